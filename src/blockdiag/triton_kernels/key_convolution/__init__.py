"""Kernels of key convolution and their launch plans."""
