"""Mechanisms that operations share; nothing here knows any of them."""
