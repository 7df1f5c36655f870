"""Benchmarks behind `python -m blockdiag bench`: cases, clocks, baselines, records and plots.

Nothing here is imported by the ops. Modules import torch, jax and matplotlib where they need them, so that a machine
that lacks one can still run the rest.
"""
