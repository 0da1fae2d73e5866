"""Offsets past 2^31 elements: the last rows equal those of a slice computed on its own."""

import pytest
import torch

from kernelwright.ops.op import registry

BACKENDS = ("triton", "cuda")
PAST = 2**31 + 2**20


def last_rows_agree(run, whole: torch.Tensor, rows: int = 64) -> None:
    last = whole[-rows:].clone()
    got = run(whole)
    assert torch.equal(got[-rows:], run(last))
    assert torch.equal(got[:rows], run(whole[:rows].clone()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [64, 2048])
def test_rmsnorm_of_more_than_two_billion_elements(backend, width):
    op = registry()["rmsnorm"]
    x = torch.empty(PAST // width, width, device="cuda", dtype=torch.bfloat16).normal_()
    last_rows_agree(lambda t: op(t, None, 1e-6, backend=backend), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_whose_rows_lie_past_two_billion_elements(backend):
    op = registry()["rmsnorm"]
    packed = torch.empty(PAST // 15360, 15360, device="cuda", dtype=torch.bfloat16).normal_()
    last_rows_agree(lambda t: op(t, None, 1e-6, backend=backend), packed[:, 5120:10240])


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_of_more_than_two_billion_elements(backend):
    op = registry()["swiglu"]
    x = torch.empty(PAST // 28672, 28672, device="cuda", dtype=torch.bfloat16).normal_()
    last_rows_agree(lambda t: op(t, "first", backend=backend), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_of_more_than_two_billion_elements(backend):
    op = registry()["apply_rope"]
    rows = PAST // 2048
    x = torch.empty(1, rows, 16, 128, device="cuda", dtype=torch.bfloat16).normal_()
    cos, sin = (torch.randn(rows, 64, device="cuda") for _ in range(2))
    got = op(x, cos, sin, "half", backend=backend)
    want = op(x[:, -9:].clone(), cos[-9:], sin[-9:], "half", backend=backend)
    assert torch.equal(got[:, -9:], want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_residual_norm_of_more_than_two_billion_elements(backend):
    op = registry()["gated_residual_norm"]
    x = torch.empty(1, PAST // 3072, 3072, device="cuda", dtype=torch.bfloat16).normal_()
    gate, scale, shift = torch.randn(3, 1, 3072, device="cuda", dtype=torch.bfloat16)

    def run(t: torch.Tensor):
        return op(t, t, gate, None, None, scale, shift, "layer", 1e-6, backend=backend)

    for got, want in zip(run(x), run(x[:, -64:].clone()), strict=True):
        assert torch.equal(got[:, -64:], want)
