"""Choice of the number of splits of each sequence's keys, from shapes alone. Imports nothing.

No length is read. The choice is therefore made while tracing, without the host waiting for a device, and holds for
every replay of a CUDA graph.
"""

MAX_SPLITS = 128
"""Upper bound on the number of splits that is chosen."""

MIN_SPLIT_KEYS = 64
"""Minimum number of keys of a chosen split; splits begin at multiples of it."""

# Programs per multiprocessor that fit at a time, and that suffice to saturate memory bandwidth.
_RESIDENT_PROGRAMS = 3
_SATURATING_PROGRAMS = 2
# Cost of starting a program, as the number of keys that it could read in that time.
_START_KEYS = 1024
# Maximum rows of a query tile.
_TILE_ROWS = 64


def choose_splits(
    *,
    batch: int,
    query_tokens: int,
    group_size: int,
    key_heads: int,
    max_keys: int,
    is_wide: bool = False,
    multiprocessors: int = 132,
) -> int:
    """Return the number of splits with the lowest modelled time, if all sequences have their maximum length.

    In the model, the programs that run at a time share the memory bandwidth. A last wave of few programs leaves some of
    it unused. Measured on an H200 (`python -m benchmarks paged`), the choice is within a few percent of the best.

    Args:
        batch, query_tokens, group_size, key_heads: shapes of the call.
        max_keys: maximum number of keys of a sequence.
        is_wide: whether heads are so wide that one program occupies a multiprocessor.
        multiprocessors: number of multiprocessors of the GPU; an H200 has 132.
    """
    row_tiles = -(-query_tokens * group_size // _TILE_ROWS)
    programs = max(1, batch * key_heads * row_tiles)
    resident = 1 if is_wide else _RESIDENT_PROGRAMS
    saturating = 1 if is_wide else _SATURATING_PROGRAMS
    grains = max(1, -(-max_keys // MIN_SPLIT_KEYS))

    def cost(splits: int) -> int:
        keys = -(-grains // splits) * MIN_SPLIT_KEYS + _START_KEYS
        waves, rest = divmod(programs * splits, resident * multiprocessors)
        if rest:
            # A multiprocessor with one more program than others finishes last, but reads somewhat faster once alone.
            uneven = -(-rest // multiprocessors) * multiprocessors * 4 // 5
            rest = max(rest, saturating * multiprocessors, uneven)
        return keys * (waves * resident * multiprocessors + rest)

    return min(range(1, min(MAX_SPLITS, grains) + 1), key=cost)
