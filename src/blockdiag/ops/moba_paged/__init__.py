"""Mixture of block attention over a paged cache."""
