"""DTensors on four processes: every operator divides batch rows and heads, and what devices share is summed."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

# Name of a function of the worker, its arguments.
CHECKS = (
    ("check_few_key_heads", "block_diagonal", 1, False),
    ("check_few_key_heads", "moba", 2, False),
    ("check_few_key_heads", "moba", 1, True),
    ("check_rows_and_few_key_heads", "block_diagonal"),
    ("check_rows_and_few_key_heads", "moba"),
    ("check_heads_that_do_not_divide",),
    ("check_channels",),
    ("check_cache", True, False),
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
def four(tmp_path_factory):
    with several_processes(tmp_path_factory.mktemp("store"), 4) as run:
        yield lambda name, *arguments: run(f"division_worker.{name}", *arguments)


@pytest.mark.parametrize(("name", "arguments"), [(name, rest) for name, *rest in CHECKS], ids=str)
def test_division_over_four_processes(four, name, arguments):
    four(name, *arguments)
