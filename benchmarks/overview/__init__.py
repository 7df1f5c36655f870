"""Pictures and tables over all results."""
