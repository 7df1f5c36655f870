"""Lowering: regions to tile programs, with the schedules and tile sizes of their kernels."""
