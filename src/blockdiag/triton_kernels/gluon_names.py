"""Names of the Gluon language that differ between versions of Triton; device code takes them from here."""

from typing import Any

from triton.experimental.gluon import language as gl

# Orders the threads of a program. Triton 3.6 calls it `thread_barrier`, Triton 3.7 and later `barrier`.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
