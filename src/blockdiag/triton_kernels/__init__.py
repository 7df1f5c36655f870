"""Triton device code and launch plans. Nothing here imports jax or torch. Plans import triton when they are built."""
