"""Code generation: Triton and Gluon source of a region's kernels."""
