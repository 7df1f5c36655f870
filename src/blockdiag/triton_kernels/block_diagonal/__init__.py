"""Kernels of block-diagonal attention, their plans and configurations."""
