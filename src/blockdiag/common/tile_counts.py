"""Number of tiles in the token axis of a call, from shapes alone. Imports neither jax nor torch."""

from blockdiag.common.sizes import smaller_bound


def count_uniform_tiles(tokens: int, sequence_length: int, block_size: int) -> int:
    """Return the number of tiles of `tokens // sequence_length` equally long sequences, back to back."""
    return tokens // max(sequence_length, 1) * -(-sequence_length // block_size)


def count_offset_tiles(tokens: int, num_sequences: int, block_size: int) -> int:
    """Return the rows of `tiles_from_offsets`, enough for any offsets of `num_sequences` sequences."""
    # Rows before the first offset and after the last are two more segments of padding.
    return _most_tiles(tokens, num_sequences + 2, block_size)


def count_length_tiles(tokens: int, num_blocks: int, block_size: int) -> int:
    """Return the rows of `tiles_from_lengths`, enough for any lengths of `num_blocks` blocks."""
    return _most_tiles(tokens, num_blocks + 1, block_size)


def _most_tiles(tokens: int, segments: int, block_size: int) -> int:
    """Return an upper bound on the tiles of `segments` segments with `tokens` rows in total."""
    return smaller_bound(tokens, (tokens + segments * (block_size - 1)) // block_size)
