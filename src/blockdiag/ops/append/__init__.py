"""Appending new keys and values to a paged cache."""
