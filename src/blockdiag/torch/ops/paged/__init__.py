"""Paged attention for torch."""
