"""The kernel that appends to a paged cache and its launch plan."""
