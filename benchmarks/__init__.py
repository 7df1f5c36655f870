"""Benchmarks of a checkout: `python -m benchmarks OP`, with cases, clocks, baselines, records and pictures.

The wheel does not hold them. Each op has a folder: cases -> programs -> check -> clock -> records -> report -> plots.
"""
