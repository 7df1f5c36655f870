"""Constraints on tile shapes that come from the architecture or from Triton."""


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def uses_mma_sync(arch: int) -> bool:
    """Whether matrix products read both operands from registers, as before Hopper and on consumer Blackwell."""
    return arch < 90 or arch >= 120
