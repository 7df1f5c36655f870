"""Kernels of dense and masked attention, as templates that take generated device functions."""
