"""Native launches from threads that have not used CUDA before, such as autograd's own threads."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_new_thread_launches_kernels_with_descriptors():
    from blockdiag.torch import block_diagonal_attention

    operands = [torch.randn(1, 256, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    arguments = (*operands[:3], None, None, None, None, None, 0, 64, None, False, "", "")
    backward = torch.ops.blockdiag.block_diagonal_backward
    expected = backward(operands[3], *arguments)
    # Freed blocks of the same sizes let the thread allocate without calls of the CUDA runtime.
    spare = [torch.empty_like(one) for one in operands * 3]
    del spare
    torch.cuda.synchronize()
    results, failures = [], []

    def run():
        try:
            results.extend(backward(operands[3], *arguments))
        except RuntimeError as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures
    assert all(torch.equal(found, wanted) for found, wanted in zip(results, expected, strict=True))
    assert block_diagonal_attention(*operands[:3]).isfinite().all()
