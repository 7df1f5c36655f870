"""Processes that run checks of DTensors together, with gloo on CPUs or NCCL on GPUs."""

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORKERS = ("context_worker", "context_fuse_worker", "division_worker", "moba_sharding_worker", "sharding_worker")
"""Modules of this package with checks that run in several processes."""


@contextlib.contextmanager
def several_processes(folder: Path, count: int, device: str = "cpu") -> Iterator[Callable[..., None]]:
    """Yield a function that runs `module.function` of this package in all processes at once.

    It raises the error of a failed process.
    """
    # A server imports torch and JAX once, for all processes that it forks; a GPU's libraries may not be forked.
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload([f"{__package__}.{name}" for name in WORKERS])
    pipes = [context.Pipe() for _ in range(count)]
    processes = [
        context.Process(target=_serve, args=(rank, count, str(folder / "file"), theirs, device), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ours = [own for own, _ in pipes]

    def run(name: str, *arguments: object) -> None:
        for pipe in ours:
            pipe.send((name, arguments))
        waiting, problems = set(ours), []
        while waiting:
            # If one process failed, others may wait for it.
            ready = wait(waiting, timeout=10 if problems else 180)
            if not ready:
                problems.append(f"{len(waiting)} processes hang")
                break
            waiting -= set(ready)
            problems += [problem for problem in (pipe.recv() for pipe in ready) if problem is not None]
        if waiting:
            for process in processes:
                process.terminate()
        assert not problems, "\n".join(problems)

    yield run
    for pipe, process in zip(ours, processes, strict=True):
        if process.is_alive():
            pipe.send(None)
    for process in processes:
        process.join(120)  # leaving Python takes long on a busy machine
        assert process.exitcode == 0


def _serve(rank: int, world_size: int, store: str, requests: Connection, device: str) -> None:
    """Run each `module.function` of this package that arrives, and answer with None or the traceback."""
    torch.set_num_threads(1)
    # gloo would look up the host name, which may be unknown. Most of the time here is compilation.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    while (request := requests.recv()) is not None:
        name, arguments = request
        try:
            module, function = name.split(".")
            getattr(importlib.import_module(f"{__package__}.{module}"), function)(*arguments)
            if device == "cuda":
                assert torch.cuda.current_device() == rank
            requests.send(None)
        except Exception:
            requests.send(f"process {rank}: {traceback.format_exc()}")
    dist.destroy_process_group()
