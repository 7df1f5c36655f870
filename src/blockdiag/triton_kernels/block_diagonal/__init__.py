"""Kernels of block-diagonal attention, their launch plans and configurations."""
