"""Two processes that share a sequence (diffusers' context parallelism) get the same results."""

import os
import socket

import torch
import torch.multiprocessing as multiprocessing
from processes import forked


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def one_of_two(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    # diffusers assigns ranks to accelerators, and divides by their number without checking for zero
    torch.accelerator.device_count = lambda: 1

    from diffusers import ContextParallelConfig

    import kernelwright as kw
    from kernelwright import models

    model = models.build("ltx-video", tiny=True, dtype=torch.float32)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    # diffusers 0.42 gives every rank the mask of all heads, which does not fit
    inputs["encoder_attention_mask"] = None
    with torch.no_grad():
        alone = model(**inputs)[0]
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        expected = model(**inputs)[0]
        torch.testing.assert_close(expected, alone, rtol=1e-4, atol=1e-4)
        for numerics in ("fused", "exact"):
            report = kw.inject(model, numerics=numerics)
            for _ in range(2):
                result = model(**inputs)[0]
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            assert not report.problems
            assert report.sites["QK-norm + RoPE"] == {"fused": len(model.transformer_blocks)}
        assert torch.equal(result, expected)
        kw.restore(model)
        assert torch.equal(model(**inputs)[0], expected)
    torch.distributed.destroy_process_group()


def test_ulysses():
    forked()
    multiprocessing.start_processes(
        one_of_two, args=(free_port(),), nprocs=2, start_method="forkserver"
    )
