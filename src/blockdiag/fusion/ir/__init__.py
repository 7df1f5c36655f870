"""Intermediate representation: the region, its leaves and the trees of operations on tiles."""
