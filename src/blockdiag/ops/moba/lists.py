"""The block-major form of a routing: the queries of a head that chose each block. Imports neither jax nor torch."""

from typing import Any, NamedTuple


class Lists(NamedTuple):
    """Lists of the queries that chose each block, as arrays of JAX or torch.

    Query t of head n chooses at most P blocks, which fill its slots 0 .. degree - 1 in some order. The pair t * P + p
    identifies its slot p. Global block numbers index the rows of the block table (see `moba_tables`).

    Attributes:
        offsets, counts: int32 [N, num_blocks]; the list of head n and block b is
            entries[n, offsets[n, b] : offsets[n, b] + counts[n, b]], with its pairs ascending.
        entries: int32 [N, query_tokens * P]; entries that no list covers are unspecified.
        degrees: int32 [N, query_tokens]; the number of blocks that each query chose.
    """

    offsets: Any
    counts: Any
    entries: Any
    degrees: Any
