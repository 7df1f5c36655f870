"""DTensors on four processes: operators divide batch rows and heads, and partial results are summed."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

# Checks that need more than two processes; the others are in test_sharding, and all are in test_torch_division_on_gpu.
CHECKS = (
    ("check_few_key_heads", "block_diagonal", 1, False),
    ("check_few_key_heads", "moba", 2, False),
    ("check_rows_and_few_key_heads", "block_diagonal"),
    ("check_rows_and_few_key_heads", "moba"),
    ("check_cache", True, False),
    ("check_caches_that_would_move",),
    ("check_merged_states",),
    ("check_tensor_parallel", "moba"),
)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with several_processes(tmp_path_factory.mktemp("store"), 4) as run:
        yield lambda name, *arguments: run(f"division_worker.{name}", *arguments)


@pytest.mark.parametrize(("name", "arguments"), [(name, rest) for name, *rest in CHECKS], ids=str)
def test_division_check_passes_on_four_processes(four, name, arguments):
    four(name, *arguments)
