"""Lowering: a region as a tile program, with the schedule and the tile sizes of its kernels."""
