"""Block-diagonal attention beside its baselines, and host times of calls."""
