"""Mosaic GPU kernels of block-diagonal attention."""
