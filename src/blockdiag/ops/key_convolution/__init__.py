"""Depthwise causal convolution of keys, which precedes MoBA's routing."""
