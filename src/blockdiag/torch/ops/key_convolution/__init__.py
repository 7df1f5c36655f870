"""Key convolution for torch."""
