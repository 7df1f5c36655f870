"""Readable oracles, one per operation: the executable specification, computed in float32 or float64."""
