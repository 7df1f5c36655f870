"""Mixture of block attention: each query head attends to the best key blocks and to its own one."""
