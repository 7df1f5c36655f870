"""Kernels of MoBA over a paged cache and their launch plans."""
