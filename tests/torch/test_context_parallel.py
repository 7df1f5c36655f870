"""`context_parallel=` on four processes that share the tokens of sequences, compared with one process."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

# More checks are in test_torch_context_parallel_on_gpu, because every process here spends most of its time compiling.
CHECKS = (
    ("check_refusals",),
    ("check_transfers_beside_attention",),
    ("check_moba", "ulysses", "packed"),
    ("check_moba", "ulysses", "masked"),
    ("check_moba", "ulysses", "half a key head for each process"),
    ("check_moba", None, "packed"),
    ("check_moba", "gather", "one key head"),
    ("check_block_diagonal", "between blocks"),
    ("check_block_diagonal", "packed"),
    ("check_block_diagonal", "lengths"),
    ("check_block_diagonal", "exchanged"),
    ("check_key_convolution", True),
    ("check_compiled",),
    ("context_fuse_worker.check_fuse_refusals",),
    ("context_fuse_worker.check_fuse_kernels",),
    ("context_fuse_worker.check_fuse_kernels", "ring"),
    ("context_fuse_worker.check_fuse_rounding", "gather", "triton", 1.01),
    ("context_fuse_worker.check_fuse_rounding", "ulysses", "triton", 1.01),
    # This strategy merges partial results, which rounds them differently.
    ("context_fuse_worker.check_fuse_rounding", "ring", "triton", 1.1),
    ("context_fuse_worker.check_fuse", "gather, biases"),
    ("context_fuse_worker.check_fuse", "ulysses, bias"),
    ("context_fuse_worker.check_fuse", "layer"),
    ("context_fuse_worker.check_fuse", "ring, heads first"),
)
# Cases above cover the strategy of each of these, and its function or implementation.
COVERED = (
    ("check_moba", "gather", "masked"),
    ("check_block_diagonal", "within blocks"),
    ("context_fuse_worker.check_fuse_rounding", "gather", "xla", 1.01),
    ("context_fuse_worker.check_fuse", "heads first"),
    ("context_fuse_worker.check_fuse", "ring, layer"),
    ("context_fuse_worker.check_fuse", "ring, biases"),
)
CASES = [(name, rest) for name, *rest in CHECKS]
CASES += [pytest.param(name, rest, marks=pytest.mark.exhaustive) for name, *rest in COVERED]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with several_processes(tmp_path_factory.mktemp("store"), 4) as run:
        yield lambda name, *arguments: run(name if "." in name else f"context_worker.{name}", *arguments)


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_context_parallel_check_passes_on_four_processes(four, name, arguments):
    four(name, *arguments)
