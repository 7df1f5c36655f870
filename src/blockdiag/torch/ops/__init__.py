"""The registered torch operators, one package per operation."""
