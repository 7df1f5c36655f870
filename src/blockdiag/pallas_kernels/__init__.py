"""Pallas device code in the Mosaic GPU dialect, for Hopper GPUs. Nothing heavy is imported here."""
