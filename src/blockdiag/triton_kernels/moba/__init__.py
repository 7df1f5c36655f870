"""Kernels of MoBA, their plans and configurations."""
