"""`fuse` for torch: traced JAX programs whose regions torch launches."""
