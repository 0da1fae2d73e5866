"""CUDA graphs of a model's forward: the bits of a plain call, whatever changes between calls."""

import copy
import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.graphs.capture import DRAWS
from kernelwright.inject.graphs.graphs import Graphs

WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads)
        return x + scale * self.proj(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, timestep, scale=1.0):
        x = x + timestep[:, None, None].to(x.dtype)
        for block in self.blocks:
            x = block(x, scale)
        return {"sample": x, "mean": x.mean(dim=1)}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack().eval().to("cuda", torch.bfloat16)


def inputs(seed, tokens=96):
    torch.manual_seed(seed)
    x = torch.randn(2, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    # a step taken out of a table and expanded, as the loops of pipelines do
    return x, torch.arange(100.0, device="cuda")[seed % 100].expand(2)


def called(graphs, module, *args, **kwargs):
    return graphs(module, type(module).forward, args, kwargs)


def holds(graphs, module, *args, **kwargs):
    """Whether a call gives the bits of a plain one."""
    got, want = called(graphs, module, *args, **kwargs), module(*args, **kwargs)
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def test_replays_on_new_data_give_the_bits_of_a_call(model):
    graphs = Graphs()
    for seed in range(5):
        assert holds(graphs, model, *inputs(seed))
    assert graphs.captured == 1
    assert graphs.reasons == {}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("autocast", [True, False])
def test_modes_give_the_bits_of_a_call(model, mode, autocast):
    model = model.float() if autocast else model
    graphs = Graphs()
    for _ in range(2):
        with mode(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for seed in range(3):
                x, step = inputs(seed)
                assert holds(graphs, model, x.float() if autocast else x, step)
    assert graphs.captured == 1


def test_signatures_take_turns(model):
    graphs = Graphs()
    for seed in range(4):
        assert holds(graphs, model, *inputs(seed, 96))
        assert holds(graphs, model, *inputs(seed, 64))
        assert holds(graphs, model, *inputs(seed, 96), scale=0.5)
    assert graphs.captured == 3


def test_strided_inputs_give_the_bits_of_a_call(model):
    graphs = Graphs()
    for seed in range(4):
        x, step = inputs(seed)
        assert holds(graphs, model, torch.cat((x, x), dim=-1)[..., WIDTH:], step)
        assert holds(graphs, model, x[:1].expand(2, -1, -1), step)
    assert graphs.captured == 2


def test_results_are_not_changed_by_later_calls(model):
    graphs = Graphs()
    results = [called(graphs, model, *inputs(seed)) for seed in range(5)]
    for seed, result in enumerate(results):
        assert torch.equal(result["sample"], model(*inputs(seed))["sample"])


class Wide(nn.Module):
    """Needs 256 MiB in between, and returns little."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 16384, bias=False)

    def forward(self, x, scale):
        return (self.up(x) * scale).sum(dim=-1)


def reserved():
    gc.collect()
    torch.cuda.synchronize()  # memory that another stream has used is given back after that
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_graphs_share_their_memory_and_give_it_back():
    graphs, wide = Graphs(), Wide().eval().cuda()
    x = torch.randn(4096, 64, device="cuda")
    for scale in (1.0, 2.0):
        called(graphs, wide, x, scale)
    seen = [reserved()]
    for scale in (1.0, 2.0):
        called(graphs, wide, x, scale)
        seen.append(reserved())
    assert graphs.captured == 2
    assert seen[1] - seen[0] >= 256 * 2**20
    assert seen[2] - seen[1] < 32 * 2**20
    for scale in (1.0, 2.0, 1.0):
        assert torch.equal(called(graphs, wide, x, scale), wide(x, scale))
    graphs.clear()
    # all but the workspace of cuBLAS
    assert reserved() - seen[0] < 128 * 2**20


def test_weights_written_in_place_are_seen_without_another_capture(model):
    graphs = Graphs()
    for seed in range(3):
        assert holds(graphs, model, *inputs(seed))
    for weight in model.parameters():
        weight.mul_(1.25)
    assert holds(graphs, model, *inputs(3))
    assert graphs.reasons == {}


def add_lora(model):
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=4, target_modules=["qkv"], init_lora_weights=False)
    inject_adapter_in_model(config, model)
    model.to(torch.bfloat16)


def replace_data(model):
    weight = model.blocks[0].proj.weight
    weight.data = weight.data * 2


def leave_and_come_back(model):
    """What was the memory of the weights is no memory any more when the model runs again."""
    model.cpu()
    torch.cuda.empty_cache()
    taken = torch.empty(2**20, device="cuda")
    model.cuda()
    del taken


def empty_and_fill(model):
    """Free the weights where they are, as a loop that offloads by hand may."""
    kept = {n: (p.cpu(), p.untyped_storage().nbytes()) for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    taken = torch.empty(2**20, device="cuda")
    for name, parameter in model.named_parameters():
        values, size = kept[name]
        parameter.untyped_storage().resize_(size)
        parameter.copy_(values)
    del taken


CHANGES = {
    "memory given back": leave_and_come_back,
    "emptied and filled": empty_and_fill,
    "dtype and back": lambda m: m.float().to(torch.bfloat16),
    "to the CPU and back": lambda m: m.cpu().cuda(),
    "data": replace_data,
    "a block replaced": lambda m: m.blocks.__setitem__(
        1, Block().eval().to("cuda", torch.bfloat16)
    ),
    "LoRA": add_lora,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_followed(model, change):
    graphs = Graphs()
    for seed in range(3):
        assert holds(graphs, model, *inputs(seed))
    change(model)
    for seed in range(4):
        assert holds(graphs, model, *inputs(seed))
    assert graphs.captured == 1


def test_the_scale_of_lora_is_followed(model):
    add_lora(model)
    graphs, results = Graphs(), []
    for scale in (1.0, 0.25):
        for block in model.blocks:
            block.qkv.set_scale("default", scale)
        for _ in range(3):
            assert holds(graphs, model, *inputs(0))
        results.append(called(graphs, model, *inputs(0))["sample"])
    assert graphs.captured == 1
    assert not torch.equal(*results)


class Waits(nn.Module):
    def forward(self, x):
        torch.cuda.synchronize()
        return x * 2


def test_after_a_capture_that_failed_everything_goes_on(model):
    graphs, waits = Graphs(), Waits().eval()
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        assert torch.equal(called(graphs, waits, x), x * 2)
    (reason,) = graphs.reasons
    assert reason.startswith("capture failed: ")
    assert graphs.captured == 0
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # random numbers, memory and captures, of the same object and of another
    first, second = (torch.randn(1 << 20, device="cuda") for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.isfinite(first @ first)
    for each in (graphs, Graphs()):
        for seed in range(4):
            assert holds(each, model, *inputs(seed))
        assert each.captured == 1


def test_memory_used_on_two_streams_is_reused_after_a_capture_that_failed():
    graphs, waits, x = Graphs(), Waits().eval(), torch.ones(8, device="cuda")
    for _ in range(2):
        called(graphs, waits, x)
    side = torch.cuda.Stream()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(8):
        block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 2 * 64 * 2**20


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_random_numbers_go_on_as_in_plain_calls():
    graphs, noisy, x = Graphs(), Noisy().eval(), torch.zeros(1 << 16, device="cuda")
    torch.manual_seed(1)
    want = [noisy(x) for _ in range(4)]
    torch.manual_seed(1)
    got = [called(graphs, noisy, x) for _ in range(4)]
    # without a graph: another thread may draw from the same generator
    assert graphs.captured == 0
    assert set(graphs.reasons) == {DRAWS}
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_the_least_recently_used_graph_is_dropped(model):
    graphs = Graphs(limit=2)
    for tokens in (32, 64, 96, 32, 128):
        for seed in range(3):
            assert holds(graphs, model, *inputs(seed, tokens))
        assert graphs.captured <= 2
    assert graphs.captured == 2


@pytest.mark.parametrize("sizes", [(96, 96), (96, 64)])
def test_threads_on_streams_of_their_own(model, sizes):
    graphs, errors, found = Graphs(), [], [[], []]
    given = [[inputs(seed + 50 * t, sizes[t]) for seed in range(50)] for t in range(2)]
    want = [[model(*args)["sample"] for args in each] for each in given]
    torch.cuda.synchronize()

    def work(number):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for args in given[number]:
                    found[number].append(called(graphs, model, *args)["sample"])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for got, expected in zip(found, want, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, expected, strict=True))
    assert graphs.captured == len(set(sizes)), graphs.describe()


def test_streams_take_turns(model):
    graphs, streams = Graphs(), [torch.cuda.Stream() for _ in range(3)]
    given = [inputs(seed) for seed in range(30)]
    want = [model(*args)["sample"] for args in given]
    torch.cuda.synchronize()
    got = []
    for number, args in enumerate(given):
        with torch.cuda.stream(streams[number % 3]):
            got.append(called(graphs, model, *args)["sample"])
    torch.cuda.synchronize()
    assert graphs.captured == 1
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_capture_around_it_takes_in_the_forward_itself(model):
    graphs = Graphs()
    x, step = inputs(0)
    for _ in range(2):
        called(graphs, model, x, step)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        result = called(graphs, model, x, step)["sample"]
    other, _ = inputs(1)
    x.copy_(other)
    outer.replay()
    assert torch.equal(result, model(x, step)["sample"])
    assert graphs.reasons == {"inside another capture": 1}


def test_a_tensor_on_the_cpu_among_the_inputs_runs_without_a_graph(model):
    graphs = Graphs()
    x, step = inputs(0)

    def forward(self, x, step):
        return self(x, step.to("cuda"))

    for _ in range(3):
        graphs(model, forward, (x, step.cpu()), {})
    assert graphs.reasons == {"inputs on cpu and cuda:0": 3}


@pytest.mark.compatibility("LoRA hot-swapping")
@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
def test_after_a_hot_swap_of_lora_calls_are_replays_again(prepared, monkeypatch):
    """As diffusers loads the next adapter with hotswap=True, and as it prepares for other ranks."""
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    from peft.utils.hotswap import (
        hotswap_adapter_from_state_dict,
        prepare_model_for_compiled_hotswap,
    )

    def adapted(rank, seed):
        torch.manual_seed(seed)
        made = models.build("ltx-video", tiny=True, device="cuda", dtype=torch.bfloat16)
        config = LoraConfig(r=rank, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
        inject_adapter_in_model(config, made)
        return made.to(torch.bfloat16), config

    model, config = adapted(8, seed=1)
    if prepared:
        prepare_model_for_compiled_hotswap(model, target_rank=8, config=config)
    other = get_peft_model_state_dict(adapted(4 if prepared else 8, seed=2)[0])
    # as diffusers names them for a swap
    other = {k.replace(".weight", ".default.weight"): v for k, v in other.items()}
    twin = copy.deepcopy(model)
    given = models.inputs("ltx-video", tiny=True, device="cuda", dtype=torch.bfloat16)
    report = kw.inject(model, graphs=True)
    (graphs,), replays, replay = report.graphs, [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda g: (replays.append(g), replay(g)))
    seen = []
    for adapter in (None, other):
        if adapter is not None:
            for side in (model, twin):
                hotswap_adapter_from_state_dict(side, adapter, "default", config=config)
        for _ in range(4):
            got, want = model(**given)[0], twin(**given)[0]
            assert torch.equal(got, want), report
        replays.clear()
        without = sum(graphs.reasons.values())
        model(**given)
        assert len(replays) == 1, graphs.describe()
        assert sum(graphs.reasons.values()) == without
        seen.append(want)
    assert not torch.equal(*seen)


ORDER = """
import torch
import torch.nn.functional as F
from kernelwright.inject.state.switches import switches

x = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, device="cuda")
before = switches("cuda")
F.scaled_dot_product_attention(x, x, x)
assert switches("cuda") == before, (before, switches("cuda"))
"""


def test_the_first_attention_of_a_process_changes_no_switch():
    """PyTorch finds its order of attention kernels there: verdicts of the first forward would hold
    for another order, and every block would be compared again in the second."""
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
