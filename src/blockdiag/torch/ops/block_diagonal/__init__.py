"""Block-diagonal attention for torch."""
