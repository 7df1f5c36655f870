"""MoBA beside its baselines."""
