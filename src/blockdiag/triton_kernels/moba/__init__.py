"""Kernels of MoBA, their launch plans and configurations."""
