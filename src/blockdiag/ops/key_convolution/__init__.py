"""Depthwise causal convolution of keys, applied before MoBA's routing."""
