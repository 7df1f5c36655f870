"""Experiments beside the benchmarks: recall, models, sums, kernel variants."""
