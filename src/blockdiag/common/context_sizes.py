"""Arithmetic of context parallelism, shared by JAX and torch. Imports neither."""


def next_multiple(size: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `size`."""
    return -(-size // of) * of


def choose_groups(key_heads: int, devices: int) -> int:
    """Return the number of head groups in an exchange.

    It is the largest of 4, 3, 2, 1 that divides the key heads per device.
    """
    own = key_heads // devices
    return next(groups for groups in (4, 3, 2, 1) if own % groups == 0)


def zigzag_owner(part: int, devices: int) -> int:
    """Return the device that owns a part in zigzag order, of `2 * devices` parts."""
    return min(part, 2 * devices - 1 - part)
