"""Kernels of key convolution, and their plans."""
