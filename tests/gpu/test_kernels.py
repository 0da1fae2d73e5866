"""Every op, on every backend, dtype and layout: as close to float64 as eager PyTorch is."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here: tests/gpu", allow_module_level=True)

from declared import DTYPES, every_case
from numerics import as_tuple, hold_case

from kernelwright.ops.case import Inputs
from kernelwright.ops.op import Op, registry

BACKENDS = ("triton", "cuda")
ALL = list(registry().values())
KERNELS = [op for op in ALL if set(BACKENDS) <= set(op.backends)]
INPLACE = [op for op in ALL if isinstance(op, Op) and op.inplace]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@every_case(KERNELS)
def test_a_kernel_is_as_close_to_float64_as_eager(op, case, backend, dtype):
    hold_case(op, case, dtype, lambda a: op.call(a, backend=backend), "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@every_case([op for op in ALL if op not in KERNELS])
def test_what_auto_picks_is_as_close_to_float64_as_eager(op, case, dtype):
    hold_case(op, case, dtype, lambda a: op.call(a), "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@every_case(INPLACE)
def test_inplace_gives_the_bits_of_a_fresh_output(op, case, backend):
    arguments = case.arguments(Inputs(torch.bfloat16, "cuda"))
    fresh = as_tuple(op.call(arguments, backend=backend))
    changed = as_tuple(op.call(arguments, backend=backend, inplace=True))
    assert all(torch.equal(f, c) for f, c in zip(fresh, changed, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("width", [33, 64, 769, 1152, 3584, 5120])
def test_storage_that_starts_anywhere_is_read_and_written_right(backend, offset, width):
    op = registry()["gated_residual_norm"]
    storage = torch.randn(8, 5 * width + 8, device="cuda", dtype=torch.bfloat16)
    x, residual = (storage[i, offset : offset + 5 * width].view(5, width) for i in (0, 1))
    outs = tuple(
        torch.full((5 * width + 8,), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    views = tuple(o[offset : offset + 5 * width].view(5, width) for o in outs)
    args = (residual, x, None, None, None, None, None, "rms", 1e-6)
    want = op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), backend=backend)
    op(*args, out=views, backend=backend)
    for o, v, w in zip(outs, views, want, strict=True):
        # another alignment may take another order of summation: one unit in the last place
        torch.testing.assert_close(v, w, rtol=2**-7, atol=0)
        assert (o[:offset] == 7).all(), "written before the output"
        assert (o[offset + 5 * width :] == 7).all(), "written past the output"


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_and_many_rows_agree(backend):
    op = registry()["rmsnorm"]
    x = torch.randn(70_000, 64, device="cuda", dtype=torch.float16)
    whole = op(x, None, 1e-6, backend=backend)
    for rows in (1, 7, 65_535, 65_536):
        assert torch.equal(op(x[:rows], None, 1e-6, backend=backend), whole[:rows])
