"""Calls of paged attention that can be timed: kernels launched natively, calls through JAX, and baselines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.programs import Chain, compile_program
from benchmarks.paged.arrays import Tensors
from benchmarks.paged.cases import MOBA, PagedCase

type Launch = Callable[..., tuple[torch.Tensor, ...]]

SDPA_BACKENDS = {"torch-fa2": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
JAX_CUDNN = "jax-cudnn"
BASELINES = (*SDPA_BACKENDS, JAX_CUDNN, MOBA)


def launch_steps(case: PagedCase) -> Sequence[Any]:
    """The kernel launches of a case, each of which reads arrays by name and adds those that it writes."""
    from blockdiag.triton_kernels.append.plans import AppendLaunch
    from blockdiag.triton_kernels.moba_paged.plans import steps
    from blockdiag.triton_kernels.paged.plans import launches
    from blockdiag.triton_kernels.paged.tables import TilesLaunch

    if case.group == "append":
        return (AppendLaunch(case.append_problem()),)
    if case.block_size is not None:
        return steps(case.moba_problem())
    problem = case.problem()
    table = [] if problem.tiled.num_tiles is None else [TilesLaunch(problem)]
    return [*table, *launches(problem.tiled)]


def run_steps(steps: Sequence[Any], arrays: Tensors, launch: Launch) -> Tensors:
    """The arrays of a call and those that its launches write."""
    found = dict(arrays)
    for step in steps:
        results = launch(step, *(found[name] for name in step.input_names))
        found.update(zip(step.output_names, results, strict=True))
    return found


def sdpa_call(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's attention of query [B, T, N, H] to a contiguous cache [B, S, K, H].

    All keys are seen by single queries, and those up to the query's position if there are as many queries as keys.
    """
    is_causal = query.shape[1] == key.shape[1]
    query, key, value = (array.transpose(1, 2) for array in (query, key, value))
    with sdpa_kernel(backend):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=True
        )
    return output.transpose(1, 2)


def moba_call(case: PagedCase, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`moba_attention` of whole prompts to a contiguous cache [B, S, K, H]: mean keys, choice, lists and attention."""
    from blockdiag.torch import moba_attention

    assert case.block_size is not None and case.top_k is not None
    with torch.no_grad():
        return moba_attention(query, key, value, block_size=case.block_size, top_k=case.top_k)


def jax_attention(case: PagedCase, implementation: str) -> Callable[..., Any]:
    """Output and log-sum-exp of `paged_attention`, or of MoBA, from a query and the other arrays by name."""
    from blockdiag.ops.moba_paged.api import moba_paged_attention
    from blockdiag.ops.paged.api import paged_attention

    def attend(query: Any, arrays: Mapping[str, Any]) -> Any:
        tables = arrays["page_table"], arrays["kv_lengths"]
        options: dict[str, Any] = {
            "key_scale": arrays.get("key_scale", arrays.get("score_scale")),
            "value_scale": arrays.get("value_scale"),
            "implementation": implementation,
            "return_residual": True,
        }
        if case.block_size is not None:
            options |= {"block_size": case.block_size, "top_k": case.top_k}
            cache = arrays["key"], arrays["value"]
            return moba_paged_attention(query, *cache, *tables, arrays["centroids"], **options)
        cache = arrays["key"], arrays.get("value")
        return paged_attention(
            query, *cache, *tables, num_splits=case.splits, value_dim=case.shape.latent_values, **options
        )

    return attend


def jax_append(
    case: PagedCase, arrays: Mapping[str, Any], implementation: str
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the arrays that `append_to_pages` writes, by name, and the compiled call."""
    import jax

    from blockdiag.ops.append.api import append_to_pages

    tokens = (case.shape.batch, case.query_tokens)
    given = dict(arrays)
    given |= {name: given[name].reshape(*tokens, *given[name].shape[1:]) for name in ("key", "value")}
    call = jax.jit(lambda given: append_to_pages(**given, implementation=implementation))
    written = ("key_pages", "value_pages", *(("key_scale", "value_scale") if case.scales == "token" else ()))
    return dict(zip(written, call(given), strict=True)), lambda: call(given)


def jax_cudnn_attention(query: Any, arrays: Mapping[str, Any]) -> Any:
    """Attention of query [B, T, N, H] to a contiguous cache by cuDNN, as in `sdpa_call`; it has no log-sum-exp."""
    import jax

    key, value = arrays["key"], arrays["value"]
    is_causal = query.shape[1] == key.shape[1]
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn"), None


def jax_program(attend: Callable[..., Any], arrays: Mapping[str, Any], calls: int) -> tuple[Any, Callable[[], Any]]:
    """Output and log-sum-exp of one call, and a compiled program of several, each of which takes the output before as
    its query, so that a program lasts longer than the host needs to queue it.

    Raises:
        ChainBroken: the program does not launch what so many calls launch.
    """

    def link(attend: Callable[..., Any], calls: int) -> Callable[..., Any]:
        def chained(query: Any, rest: Mapping[str, Any]) -> Any:
            for _ in range(calls):
                output = attend(query, rest)[0].astype(query.dtype)
                # Queries of latent caches are wider than the output.
                query = output if output.shape == query.shape else query.at[..., : output.shape[-1]].set(output)
            return query

        return chained

    query, rest = arrays["query"], {name: array for name, array in arrays.items() if name != "query"}
    program = compile_program(attend, query, rest, chain=Chain(link, is_exact=True))
    assert program.chain is not None
    return program.run(), program.chain(calls).run
