"""`context_parallel=` on GPUs through NCCL: the checks of tests/torch/test_context_parallel.py, with kernels."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

pytestmark = pytest.mark.multigpu

CHECKS = (
    ("check_refusals",),
    ("check_transfers_beside_attention",),
    ("check_moba", "ulysses", "packed"),
    ("check_moba", "ulysses", "masked"),
    ("check_moba", "ulysses", "half a key head for each process"),
    ("check_moba", "gather", "packed"),
    ("check_moba", "gather", "masked"),
    ("check_moba", None, "one key head"),
    ("check_block_diagonal", "between blocks"),
    ("check_block_diagonal", "within blocks"),
    ("check_block_diagonal", "packed"),
    ("check_block_diagonal", "lengths"),
    ("check_block_diagonal", "exchanged"),
    ("check_key_convolution", False),
    ("check_key_convolution", True),
    ("check_compiled",),
    ("context_fuse_worker.check_fuse_refusals",),
    ("context_fuse_worker.check_fuse_kernels",),
    ("context_fuse_worker.check_fuse", "gather"),
    ("context_fuse_worker.check_fuse", "ulysses"),
    ("context_fuse_worker.check_fuse", "ulysses, bias"),
    ("context_fuse_worker.check_fuse", "gather, biases"),
    ("context_fuse_worker.check_fuse", "layer"),
    ("context_fuse_worker.check_fuse", "heads first"),
    ("context_fuse_worker.check_fuse_kernels", "ring"),
    ("context_fuse_worker.check_fuse", "ring"),
    ("context_fuse_worker.check_fuse", "ring, biases"),
    ("context_fuse_worker.check_fuse", "ring, layer"),
    ("context_fuse_worker.check_fuse", "ring, heads first"),
)


@pytest.fixture(scope="module")
def all_gpus(tmp_path_factory):
    """Yield a function that runs a worker in one process per GPU, in an even number of at most 8."""
    count = min(torch.cuda.device_count() // 2 * 2, 8)
    with several_processes(tmp_path_factory.mktemp("store"), count, "cuda") as run:
        yield lambda name, *arguments: run(name if "." in name else f"context_worker.{name}", *arguments)


@pytest.mark.parametrize(("name", "arguments"), [(name, rest) for name, *rest in CHECKS], ids=str)
def test_context_parallel_check_passes_on_all_gpus(all_gpus, name, arguments):
    all_gpus(name, *arguments)
