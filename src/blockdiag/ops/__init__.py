"""Operations: what each one means, whoever computes it, one package an operation."""
