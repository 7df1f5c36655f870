"""MoBA for torch."""
