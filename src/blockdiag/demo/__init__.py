"""The small language models that `python -m blockdiag demo` and the examples train."""
