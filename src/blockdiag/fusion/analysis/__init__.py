"""Analysis: ranges of values, masks, and which tiles of scores are live."""
