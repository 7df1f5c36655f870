"""Triton kernels on the CPU: an extension of Triton's interpreter that rounds like a GPU."""
