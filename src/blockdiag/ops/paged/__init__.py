"""Paged attention: few queries against a long paged cache of keys and values."""
