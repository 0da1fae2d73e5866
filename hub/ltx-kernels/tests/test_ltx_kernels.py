"""The package as the Hub serves it. Build it first:

kernelwright hub build --out hub/ltx-kernels
LOCAL_KERNELS="kernelwright/ltx-kernels=$PWD/hub/ltx-kernels" pytest hub/ltx-kernels/tests
"""

import os

import pytest
import torch
import torch.nn.functional as F
from kernels import get_kernel

REPOSITORY = "kernelwright/ltx-kernels"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if REPOSITORY not in os.environ.get("LOCAL_KERNELS", ""):
    pytest.skip("LOCAL_KERNELS does not name the package", allow_module_level=True)


@pytest.fixture(scope="module")
def ltx():
    return get_kernel(REPOSITORY, version=0)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rmsnorm_is_that_of_pytorch_but_for_one_rounding(ltx, dtype):
    x = torch.randn(3, 17, 256, device=DEVICE, dtype=dtype)
    weight = torch.rand(256, device=DEVICE, dtype=dtype) + 0.5
    got = ltx.rmsnorm(x, weight)
    want = F.rms_norm(x.double(), (256,), weight.double(), 1e-6)
    # half a unit in the last place, and float32's own error before it
    torch.testing.assert_close(
        got.double(), want, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-6
    )


@pytest.mark.kernels_ci
def test_gradients_are_those_of_pytorch(ltx):
    x = torch.randn(4, 64, device=DEVICE, dtype=torch.float32, requires_grad=True)
    (ltx.rmsnorm(x) ** 2).sum().backward()
    got, x.grad = x.grad, None
    (F.rms_norm(x, (64,), None, 1e-6) ** 2).sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels_ci
def test_it_compiles_without_a_graph_break(ltx):
    x = torch.randn(4, 64, device=DEVICE)
    compiled = torch.compile(lambda x: ltx.rmsnorm(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), ltx.rmsnorm(x) + 1)
