"""Fused functions beside their baselines."""
