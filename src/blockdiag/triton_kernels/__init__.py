"""Triton device code and launch plans. Nothing here imports jax or torch; plans do not import triton until built."""
