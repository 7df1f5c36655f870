"""Device functions that kernels of several operations share."""
