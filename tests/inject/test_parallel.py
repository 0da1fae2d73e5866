"""Injection in two processes that share a sequence (diffusers' context parallelism), the weights
(FSDP2) or nothing but gradients (DDP): each gets the bits it had without."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from everything import EVERYTHING
from fuser.blocks import Block
from processes import forked

import kernelwright as kw
from inject.harness import programs_of, run, same
from inject.test_programs import Model, inputs_of_block
from kernelwright import models
from kernelwright.fuser.block_calls import blocks

SMALL = {"tiny": True, "dtype": torch.float32}
# both processes get half of the text
SIZES = {"text": 10}
KINDS = {
    "ltx-video": {"LTXVideoTransformerBlock"},
    "flux2-dev": {"Flux2TransformerBlock", "Flux2SingleTransformerBlock"},
    "qwen-image": {"QwenImageTransformerBlock"},
}


def built(preset):
    model, inputs = models.build(preset, **SMALL), models.inputs(preset, **SMALL, **SIZES)
    if preset == "ltx-video":
        # diffusers 0.42 gives every rank the mask of all heads, which does not fit
        inputs["encoder_attention_mask"] = None
    return model, inputs


def share_sequence(model):
    from diffusers import ContextParallelConfig

    # diffusers assigns ranks to accelerators, and divides by their number without checking for zero
    torch.accelerator.device_count = lambda: 1
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    return model


def share_weights(model):
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
    return model


def share_gradients(model):
    return torch.nn.parallel.DistributedDataParallel(model)


class Exchanges:
    """Counts how often this process exchanges tensors within attention."""

    def __init__(self):
        from diffusers.models import attention_dispatch

        self.count, usual = 0, attention_dispatch._all_to_all_single

        def counted(*args):
            self.count += 1
            return usual(*args)

        attention_dispatch._all_to_all_single = counted

    def of(self, model, inputs):
        """The result of a forward, and how many exchanges it took."""
        before = self.count
        return run(model, inputs), self.count - before


def check(preset, share, exchanges):
    """Injected before and after they share anything, blocks run as programs, with eager's bits, and
    exchange tensors exactly as often: a process that did so once more would wait forever."""
    model, inputs = built(preset)
    before = kw.inject(model, recipes=False)
    model = share(model)
    results = [exchanges.of(model, inputs) for _ in range(3)]
    kw.restore(model)
    expected, count = exchanges.of(model, inputs)
    after = kw.inject(model, recipes=False)
    results += [exchanges.of(model, inputs) for _ in range(3)]
    kw.restore(model)
    results.append(exchanges.of(model, inputs))
    assert bool(count) == (share is share_sequence)
    assert all(same(got, expected) and n == count for got, n in results)
    for report in (before, after):
        assert not report.problems, report.problems
        assert {kind.removeprefix("FSDP") for kind in programs_of(report)[0]} == KINDS[preset]
        assert not report.programs[0].fell_back


def recipe_of_ltx(exchanges):
    model, inputs = built("ltx-video")
    alone = run(model, inputs)
    share_sequence(model)
    expected, count = exchanges.of(model, inputs)
    torch.testing.assert_close(expected, alone, rtol=1e-4, atol=1e-4)
    for numerics in ("fused", "exact"):
        report = kw.inject(model, numerics=numerics)
        for _ in range(2):
            result, exchanged = exchanges.of(model, inputs)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            assert exchanged == count
        assert not report.problems
        assert report.sites["QK-norm + RoPE"] == {"fused": len(model.transformer_blocks)}
    assert same(result, expected)
    kw.restore(model)
    assert same(run(model, inputs), expected)


class Summed(Block):
    """A block whose own code sums over the processes."""

    def forward(self, *inputs):
        result = super().forward(*inputs)
        distributed.all_reduce(result)
        return result


def own_collectives():
    model, inputs = Model(Summed).eval(), inputs_of_block()
    expected = run(model, inputs)
    with kw.injected(model) as report:
        assert all(same(run(model, inputs), expected) for _ in range(2))
    (line,) = report.blocks
    assert "it exchanges tensors with other processes (c10d.allreduce_" in str(line)


def one_of_two(rank, port, share, presets):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # a process that fails leaves the other one waiting
    patience = timedelta(seconds=120)
    distributed.init_process_group("gloo", timeout=patience, rank=rank, world_size=2)
    exchanges = Exchanges()
    if share is share_sequence:
        recipe_of_ltx(exchanges)
    else:
        own_collectives()
    for preset in presets:
        check(preset, share, exchanges)
    distributed.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "presets"),
    [
        pytest.param(
            share_sequence,
            # LTX-Video shares a sequence with its recipe, too
            [name for name in KINDS if EVERYTHING or name != "ltx-video"],
            marks=pytest.mark.compatibility("Ulysses context parallelism"),
        ),
        # FSDP2 and DDP know nothing of what a block computes, so one model with two kinds of block
        pytest.param(share_weights, ["flux2-dev"], marks=pytest.mark.compatibility("FSDP2")),
        pytest.param(share_gradients, ["flux2-dev"], marks=pytest.mark.compatibility("DDP")),
    ],
    ids=["share_sequence", "share_weights", "share_gradients"],
)
def test_two_processes_that(share, presets):
    forked()
    multiprocessing.start_processes(
        one_of_two, args=(free_port(), share, presets), nprocs=2, start_method="forkserver"
    )
