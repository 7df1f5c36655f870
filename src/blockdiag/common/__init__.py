"""Mechanisms that operations share. Nothing here depends on a particular operation."""
