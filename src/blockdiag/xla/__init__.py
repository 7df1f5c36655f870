"""Efficient implementations in plain `jax.numpy`: the default on a CPU, and what every platform falls back on."""
