"""Adapters have the same effect on an injected model as on one that is not injected.

The effects of fusing, scaling and unloading are stated in terms of the model's own results, then
compared with a twin that was treated the same.
"""

import copy

import pytest
import torch
from everything import share

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.graphs import graphs

from .stand_in import CpuGraphs, alignment_of_new_memory  # noqa: F401

peft = pytest.importorskip("peft")

NAMES = ("ltx-video", "flux-dev", "wan-1.3b")
# a fused weight sums the same terms in another order, at most 512 of them in a layer of tiny models
CLOSE = 512 * torch.finfo(torch.float32).eps


def near(a, b):
    return ((a - b).norm() / b.norm()).item() < CLOSE


class Pair:
    """An injected model and a twin; every change is made to both."""

    def __init__(self, name, numerics="exact", lora_first=False, recipes=True):
        how = {"tiny": True, "dtype": torch.float32}
        self.twin, self.inputs = models.build(name, **how), models.inputs(name, **how)
        self.model = copy.deepcopy(self.twin)
        if lora_first:
            self.load("style")
        kw.inject(self.model, numerics=numerics, recipes=recipes)

    def do(self, change):
        for model in (self.twin, self.model):
            change(model)

    def load(self, name, seed=1):
        def add(model):
            torch.manual_seed(seed)
            targets = ["to_q", "to_k", "to_v", "to_out.0"]
            config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
            model.add_adapter(config, adapter_name=name)

        self.do(add)

    @torch.no_grad()
    def result(self, **more):
        """The result of the injected model, twice, checked against the twin."""
        want = self.twin(**self.inputs, **more)[0]
        for _ in range(2):
            got = self.model(**self.inputs, **more)[0]
            assert torch.equal(got, want), f"off by {(got - want).abs().max():.3g}"
        return got


# one of them without its recipe, too
KINDS = [*NAMES, "ltx-video as programs"]
ORDERS = [("inject first", "lora first"), ("lora first", "inject first")]


def kind_of(text):
    name, _, programs = text.partition(" as ")
    return {"name": name, "recipes": not programs}


# each kind in one order, in turns
@pytest.fixture(
    params=share([(k, order) for n, k in enumerate(KINDS) for order in ORDERS[n % 2]], 2),
    ids=", ".join,
)
def pair(request):
    kind, order = request.param
    made = Pair(**kind_of(kind), lora_first=order == "lora first")
    if order == "inject first":
        made.plain = made.result()
        made.load("style")
    else:
        made.do(lambda m: m.disable_lora())
        made.plain = made.result()
        made.do(lambda m: m.enable_lora())
    return made


@pytest.mark.compatibility("LoRA")
def test_a_fused_adapter_gives_what_the_adapter_gave(pair):
    beside = pair.result()
    assert not near(beside, pair.plain)
    pair.do(lambda m: m.fuse_lora())
    assert near(pair.result(), beside)
    pair.do(lambda m: m.unfuse_lora())
    assert near(pair.result(), beside)


@pytest.mark.compatibility("LoRA")
def test_a_scale_lies_between_none_and_all_of_the_adapter(pair):
    full = pair.result()
    pair.do(lambda m: m.set_adapters("style", 0.0))
    assert near(pair.result(), pair.plain)
    pair.do(lambda m: m.set_adapters("style", 0.5))
    half = pair.result()
    assert not near(half, full)
    assert not near(half, pair.plain)
    pair.do(lambda m: m.set_adapters("style", 1.0))
    assert near(pair.result(), full)


def test_fused_with_a_scale_is_the_scaled_adapter(pair):
    pair.do(lambda m: m.set_adapters("style", 0.5))
    half = pair.result()
    pair.do(lambda m: m.set_adapters("style", 1.0))
    pair.do(lambda m: m.fuse_lora(lora_scale=0.5))
    assert near(pair.result(), half)


@pytest.mark.compatibility("LoRA")
def test_unloading_brings_back_the_model_without_it(pair):
    pair.result()
    pair.do(lambda m: m.unload_lora())
    assert torch.equal(pair.result(), pair.plain)


@pytest.mark.compatibility("LoRA")
def test_two_adapters_are_added_up(pair):
    one = pair.result()
    pair.load("other", seed=2)
    pair.do(lambda m: m.set_adapters(["style", "other"], [1.0, 1.0]))
    both = pair.result()
    assert not near(both, one)
    pair.do(lambda m: m.set_adapters(["style", "other"], [1.0, 0.0]))
    assert near(pair.result(), one)


def test_a_fused_adapter_stays_in_eight_bits_what_it_was():
    """In fp8 the result is that of the fused weights, to three bits of mantissa, in either order
    of loading and injecting."""
    how = {"tiny": True, "dtype": torch.float32}
    inputs = models.inputs("flux-dev", height=256, width=256, **how)
    pair = Pair("flux-dev", numerics="fp8", lora_first=True)
    with torch.no_grad():
        pair.twin.disable_lora()
        base = pair.twin(**inputs)[0]
        pair.twin.enable_lora()
        want = pair.twin(**inputs)[0]
        pair.model(**inputs)
        pair.model.fuse_lora()
        got = pair.model(**inputs)[0]
    adapter = (want - base).norm()
    assert (got - want).norm() < adapter / 2, "nearer to the model without its adapter"


@pytest.mark.compatibility("LoRA hot-swapping")
@pytest.mark.parametrize("prepared", [False, True], ids=["", "for other ranks"])
@pytest.mark.parametrize("recipes", [True, False], ids=["recipes", "programs"])
@torch.no_grad()
def test_a_hot_swap_leaves_the_graph_and_changes_the_result(recipes, prepared, monkeypatch):
    """As diffusers loads the next adapter with hotswap=True, after enable_lora_hotswap or not."""
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    from peft.utils import hotswap

    monkeypatch.setattr(graphs, "Graphs", CpuGraphs)
    how = {"tiny": True, "dtype": torch.float32}

    def adapted(rank, seed):
        torch.manual_seed(seed)
        model = models.build("ltx-video", **how)
        config = LoraConfig(r=rank, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
        inject_adapter_in_model(config, model)
        return model, config

    (model, config), inputs = adapted(8, seed=1), models.inputs("ltx-video", **how)
    other = get_peft_model_state_dict(adapted(4 if prepared else 8, seed=2)[0])
    # as diffusers names them for a swap
    other = {name.replace(".weight", ".default.weight"): t for name, t in other.items()}
    if prepared:
        hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8, config=config)
    twin = copy.deepcopy(model)
    (found,) = kw.inject(model, graphs=True, recipes=recipes).graphs
    before = [model(**inputs)[0] for _ in range(4)][-1]
    for each in (model, twin):
        hotswap.hotswap_adapter_from_state_dict(each, other, "default", config=config)
    for _ in range(3):
        replayed = found.counts[1]
        after = model(**inputs)[0]
        assert found.counts[1] > replayed
        assert torch.equal(after, twin(**inputs)[0])
    assert not torch.equal(after, before)
    assert not found.reasons
