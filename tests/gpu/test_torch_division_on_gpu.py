"""DTensors on GPUs through NCCL: the checks of the CPU processes' tests with kernels, over 2, 4 or 8 GPUs."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

pytestmark = pytest.mark.multigpu

CHECKS = (
    ("check_few_key_heads", "block_diagonal", 1, False),
    ("check_few_key_heads", "block_diagonal", 2, False),
    ("check_few_key_heads", "moba", 2, False),
    ("check_few_key_heads", "moba", 1, True),
    ("check_rows_and_few_key_heads", "block_diagonal"),
    ("check_rows_and_few_key_heads", "moba"),
    ("check_heads_that_do_not_divide",),
    ("check_channels",),
    ("check_cache", True, False),
    ("check_cache", True, True),
    ("check_cache", False, False),
    ("check_cache", False, True),
    ("check_one_key_head_in_a_cache",),
    ("check_caches_that_would_move",),
    ("check_merged_states",),
    ("check_fuse_is_refused",),
    ("check_tensor_parallel", "block_diagonal"),
    ("check_tensor_parallel", "moba"),
    ("check_modules_with_fsdp",),
)


@pytest.fixture(scope="module")
def all_gpus(tmp_path_factory):
    """Yield a function that runs a worker in one process per GPU, in an even number of at most 8."""
    count = min(torch.cuda.device_count() // 2 * 2, 8)
    with several_processes(tmp_path_factory.mktemp("store"), count, "cuda") as run:
        yield lambda name, *arguments: run(f"division_worker.{name}", *arguments)


@pytest.mark.parametrize(("name", "arguments"), [(name, rest) for name, *rest in CHECKS], ids=str)
def test_division_check_passes_on_all_gpus(all_gpus, name, arguments):
    all_gpus(name, *arguments)
