"""Into how many parts the keys of each sequence are divided, from shapes alone.

Nothing here reads a length, so that the choice is made while tracing, without the host waiting for a device, and holds
for every replay of a CUDA graph. Imports nothing.
"""

MAX_SPLITS = 128
"""Most parts that are chosen."""

MIN_SPLIT_KEYS = 64
"""Keys that a part has at least where parts are chosen; parts begin at multiples of it."""

# Programs of a multiprocessor: as many as fit side by side, and as many as read memory at its full rate.
_RESIDENT_PROGRAMS = 3
_SATURATING_PROGRAMS = 2
# What starting a program costs, in keys that it could have read meanwhile.
_START_KEYS = 1024
# Rows of a tile of queries, at most.
_TILE_ROWS = 64


def choose_splits(
    *, batch: int, query_tokens: int, group_size: int, key_heads: int, max_keys: int, multiprocessors: int = 132
) -> int:
    """Parts that take the least time by a model of it, were all sequences as long as they can be.

    Memory is shared by the programs that run at a time, as many as fit; the last ones leave some of its rate unused
    when they are few. Measured on an H200 (`python -m benchmarks paged`), the choice is within a few percent of
    the best.

    Args:
        batch, query_tokens, group_size, key_heads: shapes of the call.
        max_keys: keys that a sequence can have.
        multiprocessors: those of the GPU; an H200 has 132.
    """
    row_tiles = -(-query_tokens * group_size // _TILE_ROWS)
    programs = max(1, batch * key_heads * row_tiles)
    grains = max(1, -(-max_keys // MIN_SPLIT_KEYS))

    def cost(splits: int) -> int:
        keys = -(-grains // splits) * MIN_SPLIT_KEYS + _START_KEYS
        waves, rest = divmod(programs * splits, _RESIDENT_PROGRAMS * multiprocessors)
        if rest:
            # A multiprocessor with one program more than others is done last, though it reads somewhat faster alone.
            uneven = -(-rest // multiprocessors) * multiprocessors * 4 // 5
            rest = max(rest, _SATURATING_PROGRAMS * multiprocessors, uneven)
        return keys * (waves * _RESIDENT_PROGRAMS * multiprocessors + rest)

    return min(range(1, min(MAX_SPLITS, grains) + 1), key=cost)
