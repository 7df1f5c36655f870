"""Numbers that every kind of context parallelism needs, in JAX and in torch; imports neither."""


def next_multiple(size: int, of: int) -> int:
    """Return the least multiple of `of` that is not less than `size`."""
    return -(-size // of) * of


def choose_groups(key_heads: int, devices: int) -> int:
    """Return the groups of heads that an exchange moves: up to four, as they divide each device's key heads."""
    own = key_heads // devices
    return next(groups for groups in (4, 3, 2, 1) if own % groups == 0)


def zigzag_owner(part: int, devices: int) -> int:
    """Return the device that has a part in zigzag order, of `2 * devices` parts."""
    return min(part, 2 * devices - 1 - part)
