"""Code generation: the source of a region's kernels in Triton and Gluon."""
