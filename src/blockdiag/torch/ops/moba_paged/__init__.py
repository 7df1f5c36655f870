"""MoBA over a paged cache for torch."""
