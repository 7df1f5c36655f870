"""Paged attention: queries of decoding and of prompts against a paged cache of keys and values."""
