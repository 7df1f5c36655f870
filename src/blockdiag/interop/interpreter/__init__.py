"""Triton kernels on the CPU: an extension of Triton's interpreter with the rounding of a GPU."""
