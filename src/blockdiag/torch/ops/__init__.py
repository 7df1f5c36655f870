"""The registered torch operators, one package an operation."""
