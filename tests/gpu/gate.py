"""A gate on a CUDA stream: work queued behind it starts when the host opens it.

Tests that show "the host did not wait for the device" queue work behind a closed gate. A sleeping kernel of fixed
length would make them depend on how fast the host is, which shares its cores with other tests.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def wait_until_open(p_flag, nanoseconds):
    begin = globaltimer()
    while (tl.load(p_flag, volatile=True) == 0) & (globaltimer() - begin < nanoseconds):
        pass


class Gate:
    """A closed gate on the current stream.

    A host that waits for the device would never open the gate. The gate therefore opens by itself after `seconds`. A
    test asserts `gate.is_closed()` to show that the host has not waited.
    """

    def __init__(self, seconds: float = 20.0) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._passed = torch.cuda.Event()
        wait_until_open[(1,)](self._flag, int(seconds * 1e9))
        self._passed.record()

    def is_closed(self) -> bool:
        """Return whether the work behind the gate still waits."""
        return not self._passed.query()

    def open(self) -> None:
        """Let the work behind the gate run, and wait until the kernel no longer reads the flag."""
        self._flag.fill_(1)
        self._passed.synchronize()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
