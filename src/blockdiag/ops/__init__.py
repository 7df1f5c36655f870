"""Operations, one package each: what an operation means, independent of its implementations."""
