"""Paged attention beside its baselines."""
