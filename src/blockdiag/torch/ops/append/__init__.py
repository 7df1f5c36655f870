"""Appending to a paged cache for torch."""
