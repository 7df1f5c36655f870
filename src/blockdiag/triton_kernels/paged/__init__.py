"""Kernels of paged attention, their plans and configurations."""
