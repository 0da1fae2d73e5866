"""Exact modes give the bits of the eager chain they name: torch.equal, over sizes and layouts."""

import pytest
import torch
from declared import DTYPES, every_case
from exact_kernels import EXACT, has_kernel, promotes
from numerics import as_tuple

from kernelwright.bench.exactness import WIDTHS, mismatches
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry

CHAINS = [pytest.param(op, chain, id=f"{op.name}-{chain}") for op in EXACT for chain in op.exact]


@pytest.mark.parametrize("rows", [1, 3, 13, 100, 4608])
@pytest.mark.parametrize(("op", "chain"), CHAINS)
def test_no_element_differs_from_eager(op, chain, rows):
    for width in WIDTHS:
        found = mismatches(op, chain, rows, width, torch.bfloat16)
        assert found["mismatches"] == 0, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("op", "chain"), CHAINS)
def test_no_element_differs_in_other_dtypes(op, chain, dtype):
    for width in (64, 2048, 3072):
        found = mismatches(op, chain, 333, width, dtype)
        assert found["mismatches"] == 0, found


@pytest.mark.parametrize("dtype", DTYPES)
@every_case(EXACT)
def test_every_layout_keeps_the_bits(op, case, dtype):
    """By a kernel: a backend that is named runs or raises. Without it a call is eager itself, whose
    bits say nothing, so what has no kernel is written down in tests/exact_kernels.py."""
    arguments = case.arguments(Inputs(dtype, "cuda"))
    args = [arguments[n] for n in op.arguments]
    for chain, eager in op.exact.items():
        if promotes(op, case, chain, dtype):
            continue
        want = as_tuple(eager(*args))
        if has_kernel(op, case, chain, dtype):
            got = as_tuple(op(*args, exact=chain, backend="cuda"))
        else:
            with pytest.raises(ValueError, match="backend 'cuda' cannot run this"):
                op(*args, exact=chain, backend="cuda")
            op.forget()  # a plan that is there already warns no more
            with pytest.warns(UserWarning, match="running the eager chain"):
                got = as_tuple(op(*args, exact=chain))
        assert all(torch.equal(w, g) for w, g in zip(want, got, strict=True)), chain


@pytest.mark.parametrize("width", [1536, 3072, 5120])
def test_wan_rows_keep_the_bits_under_a_float32_modulation(width):
    """Wan holds its scale, shift and gate in float32 and its rows in bfloat16."""
    rows = Inputs(torch.bfloat16, "cuda")
    residual, x = (rows.normal(2, 333, width) for _ in range(2))
    table = Inputs(torch.float32, "cuda", seed=1).normal(2, 6, width)
    scale, shift, gate = (t.squeeze(1) for t in table.chunk(6, dim=1)[:3])
    args = (residual, x, gate, None, None, scale, shift, "layer", 1e-6)
    op = registry()["gated_residual_norm"]
    for want, got in zip(
        op.exact["wan"](*args), op(*args, exact="wan", backend="cuda"), strict=True
    ):
        assert torch.equal(want, got)
