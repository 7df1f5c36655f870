"""`python -m benchmarks`, from the root of a checkout."""

from benchmarks.app import app

app()
