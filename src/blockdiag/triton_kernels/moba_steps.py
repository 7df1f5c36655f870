"""The launches that make up each pass of MoBA, in order; JAX and torch run the same ones.

Every launch reads arrays by name and adds those that it writes (see `moba.MoBALaunch`).
"""

from blockdiag.moba_problem import MoBAProblem
from blockdiag.triton_kernels.moba import Kind
from blockdiag.triton_kernels.moba_configs import key_tiles


def routing_steps() -> tuple[Kind, ...]:
    """From query and key to chosen blocks."""
    return "centroids", "choose"


def list_steps() -> tuple[Kind, ...]:
    """From chosen blocks to lists."""
    return "count", "add_spans", "offsets", "entries"


def forward_steps(problem: MoBAProblem) -> tuple[Kind, ...]:
    """From operands and lists to output and log-sum-exp."""
    return ("items", "blocks_forward", "merge_forward") if problem.slots > 0 else ("merge_forward",)


def backward_steps(problem: MoBAProblem) -> tuple[Kind, ...]:
    """From operands, lists, output and cotangents to gradients."""
    if key_tiles(problem) > 1 and problem.slots > 0:
        return "starts", "blocks_backward", "items", "query_parts", "merge_backward"
    return "starts", "blocks_backward", "merge_backward"
