"""The seed's import line and its two examples run as written, on the CPU and on a GPU."""

import pytest
import torch

import kernelwright
import ltx_kernels

SEED = (
    "rmsnorm",
    "rmsnorm_residual",
    "rope_1d",
    "rope_3d",
    "rope_3d_extended",
    "geglu",
    "swiglu",
    "adaln_rmsnorm",
    "adaln_layernorm",
    "adaln_zero",
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_the_seed_import_line_runs():
    namespace = {}
    exec(f"from ltx_kernels import {', '.join(SEED)}", namespace)
    assert set(SEED) < set(ltx_kernels.__all__)


@pytest.mark.parametrize("name", SEED)
def test_the_seed_functions_are_the_library_functions(name):
    assert getattr(ltx_kernels, name) is getattr(kernelwright, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 1024, 2048), (2, 5, 64)], ids=str)
def test_the_rmsnorm_example(device, shape):
    x = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    weight = torch.ones(shape[-1], device=device, dtype=torch.bfloat16)
    output = ltx_kernels.rmsnorm(x, weight, eps=1e-6)
    assert output.shape == x.shape
    assert output.dtype == torch.bfloat16
    # rows of unit mean square, up to one rounding of each element
    mean_square = output.double().square().mean(-1)
    torch.testing.assert_close(
        mean_square, torch.ones_like(mean_square), rtol=2 * 2**-8, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "grid", [pytest.param((25, 30, 44), marks=pytest.mark.slow), (3, 4, 5)], ids=str
)
def test_the_rope_3d_example(device, grid):
    num_frames, height, width = grid
    tokens = num_frames * height * width
    query = torch.randn(1, tokens, 16, 64, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, tokens, 16, 64, device=device, dtype=torch.bfloat16)
    turned_query, turned_key = ltx_kernels.rope_3d(
        query, key, num_frames=num_frames, height=height, width=width
    )
    for before, after in ((query, turned_query), (key, turned_key)):
        assert after.shape == before.shape
        assert after.dtype == torch.bfloat16
        # the first token is at frame 0, row 0, column 0: no rotation
        assert torch.equal(after[:, 0], before[:, 0])
        # a rotation keeps the length of each head's vector, up to one rounding of each element
        torch.testing.assert_close(
            after.double().norm(dim=-1), before.double().norm(dim=-1), rtol=2**-8, atol=0
        )
