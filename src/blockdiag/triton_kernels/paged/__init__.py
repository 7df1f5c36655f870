"""Kernels of paged attention, their launch plans and configurations."""
