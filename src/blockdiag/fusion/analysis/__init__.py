"""Analysis: value ranges, mask states, and the live tiles of the score matrix."""
