"""The command line behind `python -m blockdiag`."""
