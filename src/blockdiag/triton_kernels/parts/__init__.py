"""Device functions shared by the kernels of several operations."""
