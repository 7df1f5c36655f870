"""From an attention variant in plain jax.numpy to one kernel: see docs/architecture.md."""
