"""A launch on the GPU takes the short way: the driver's function, on the stream of the caller."""

import pytest
import torch

from kernelwright.ops.op import registry

RMSNORM = registry()["rmsnorm"]


def test_a_triton_kernel_is_launched_without_the_python_of_its_launcher(monkeypatch):
    from triton.backends.nvidia.driver import CudaLauncher

    x = torch.randn(4, 256, device="cuda")
    want = RMSNORM(x, None, 1e-6, backend="triton")
    monkeypatch.setattr(CudaLauncher, "__call__", None)
    assert torch.equal(RMSNORM(x, None, 1e-6, backend="triton"), want)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_launch_goes_to_the_stream_of_the_caller(backend):
    x = torch.randn(4, 256, device="cuda")
    want = RMSNORM(x, None, 1e-6, backend=backend)
    here, there = torch.randn_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(there):
        torch.cuda._sleep(50_000_000)
        here.copy_(x)
        got = RMSNORM(here, None, 1e-6, backend=backend)
    there.synchronize()
    assert torch.equal(got, want)
