"""DDP and FSDP2 around an injected model leave its gradients as they are without injection."""

import socket

import pytest
import torch
import torch.distributed as dist

import kernelwright as kw
from inject.trained import data, model, output, twice


@pytest.fixture
def one_process(monkeypatch):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shared_gradients(trained):
    return torch.nn.parallel.DistributedDataParallel(trained)


def shared_weights(trained):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for block in trained.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(trained, mesh=mesh)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(shared_gradients, marks=pytest.mark.compatibility("DDP")),
        pytest.param(shared_weights, marks=pytest.mark.compatibility("FSDP2")),
    ],
)
@pytest.mark.parametrize("inject_first", [True, False])
def test_gradients_are_eagers(one_process, share, inject_first):
    eager, ours = twice(model())
    if inject_first:
        kw.inject(ours)
    around = [share(eager), share(ours)]
    if not inject_first:
        kw.inject(ours)
    for seed in range(3):
        for m in around:
            m.zero_grad(set_to_none=True)
            output(m(**data(seed))).square().mean().backward()
        pairs = zip(eager.parameters(), ours.parameters(), strict=True)
        assert all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs)
