"""Compiler from attention variants in plain jax.numpy to fused kernels; see docs/architecture_fusion.md."""
