"""Shapes of tiles, as far as an architecture and Triton decide them."""


def next_power_of_2(size: int) -> int:
    """Smallest power of two not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def uses_mma_sync(arch: int) -> bool:
    """Whether products read both operands from registers, as before Hopper and on consumer Blackwell."""
    return arch < 90 or arch >= 120
