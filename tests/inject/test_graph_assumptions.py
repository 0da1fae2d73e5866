"""What a graph assumes about a model: every change to it is detected, and nothing else is."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from kernelwright.inject.graphs.assumptions import Assumptions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.act = nn.GELU()
        self.register_buffer("table", torch.ones(8))

    def forward(self, x):
        return self.act(self.norm(self.proj(x)) * self.table)


def stack():
    return nn.Sequential(Block(), Block()).eval()


def with_lora(model, **config):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"], **config), model)
    return model[0].proj


def set_data(parameter, function):
    parameter.data = function(parameter.data)


CHANGES = {
    "a module replaced": lambda m: setattr(m[0], "act", nn.SiLU()),
    "a module added to a leaf": lambda m: m[0].act.add_module("extra", nn.Linear(8, 8)),
    "a module removed": lambda m: m.pop(1),
    "modules swapped": lambda m: m._modules.update({"0": m[1], "1": m[0]}),
    "dtype": lambda m: m.to(torch.bfloat16),
    "a parameter rebound": lambda m: setattr(m[1].proj, "weight", nn.Parameter(torch.ones(8, 8))),
    "data at another address": lambda m: set_data(m[0].proj.weight, torch.clone),
    "data transposed": lambda m: set_data(m[0].proj.weight, torch.t),
    "data cut short": lambda m: set_data(m[0].proj.weight, lambda w: w[:4]),
    "a bias dropped": lambda m: setattr(m[0].proj, "bias", None),
    "a buffer rebound": lambda m: setattr(m[0], "table", torch.ones(8)),
    "a buffer added to a leaf": lambda m: m[0].act.register_buffer("extra", torch.ones(1)),
    "training mode": lambda m: m[1].norm.train(),
    "a forward hook": lambda m: m[0].act.register_forward_hook(lambda *a: None),
    "a forward pre-hook": lambda m: m[0].act.register_forward_pre_hook(lambda *a: None),
    "an attribute on the model": lambda m: setattr(m, "note", 1),
    "an attribute on a module": lambda m: setattr(m[0].act, "note", 1),
    "a forward on a module": lambda m: setattr(m[0].act, "forward", torch.relu),
    "LoRA": with_lora,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_seen(change):
    model = stack()
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    change(model)
    assert not assumptions.same(model)
    assert Assumptions(model).same(model)


def test_values_written_into_weights_are_no_change():
    model = stack()
    assumptions = Assumptions(model)
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            weight.add_(1)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model(torch.ones(2, 8))
    assert assumptions.same(model)


def halves(model):
    return model.to(torch.bfloat16)


def swapped(model):
    torch.utils.swap_tensors(model[0].proj.weight, nn.Parameter(torch.ones(8, 8)))


def assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def emptied(model):
    for weight in model.parameters():
        weight.untyped_storage().resize_(0)


def with_setting(setting):
    """`.to()` in one of the other ways in which PyTorch implements it."""

    def change(model):
        setting(True)
        try:
            halves(model)
        finally:
            setting(False)

    return change


FREED = {
    "dtype": halves,
    "dtype, swapping": with_setting(torch.__future__.set_swap_module_params_on_conversion),
    "dtype, overwriting": with_setting(torch.__future__.set_overwrite_module_params_on_conversion),
    "device": lambda m: m.to("meta"),
    "a device without data": lambda m: m.to_empty(device="meta"),
    "data": lambda m: set_data(m[1].norm.bias, torch.clone),
    "data of another tensor": lambda m: set_data(m[1].proj.weight, lambda w: torch.ones(8, 8)),
    "a parameter rebound": lambda m: setattr(m[1].proj, "weight", nn.Parameter(torch.ones(8, 8))),
    "a parameter dropped": lambda m: setattr(m[1].proj, "bias", None),
    "a parameter deleted": lambda m: delattr(m[1].norm, "weight"),
    "a buffer rebound": lambda m: setattr(m[1], "table", torch.ones(8)),
    "swap_tensors": swapped,
    "load_state_dict(assign=True)": assigned,
    "storages emptied where they are": emptied,
}


@pytest.mark.parametrize("change", FREED.values(), ids=FREED)
def test_weights_whose_memory_is_gone_are_known_to_be(change):
    model = stack()
    assumptions = Assumptions(model)
    assert assumptions.in_place()
    change(model)
    assert not assumptions.in_place()
    assert not assumptions.same(model)


def test_weights_are_in_place_whatever_is_written_into_them_or_made_of_them():
    model = stack()
    assumptions = Assumptions(model)
    views = [w.detach()[:1] for w in model.parameters()]
    loaded = copy.deepcopy(model)
    model.load_state_dict(loaded.state_dict())
    model(torch.ones(2, 8)).sum().backward()
    del views, loaded
    assert assumptions.in_place()


def test_a_parameter_that_somebody_keeps_may_still_be_read():
    model = stack()
    assumptions = Assumptions(model)
    kept = model[1].proj.weight
    model[1].proj.weight = nn.Parameter(torch.ones(8, 8))
    assert assumptions.in_place()
    assert not assumptions.same(model)
    kept.data = torch.ones(8, 8)
    assert not assumptions.in_place()


def test_weights_that_come_back_to_where_they_were_are_watched_again():
    """As if moved back from the CPU, into their former memory."""
    model, place = stack(), np.ones((8, 8), np.float32)
    weight = model[1].proj.weight
    weight.data = torch.from_numpy(place)
    assumptions = Assumptions(model)
    weight.data = torch.from_numpy(place)
    assert assumptions.in_place()
    assert assumptions.same(model)
    weight.data = torch.from_numpy(place.copy())
    assert not assumptions.in_place()


@pytest.mark.parametrize(("change", "count"), [(halves, 2), (swapped, 1), (assigned, 2)])
def test_watching_keeps_no_memory(change, count):
    model, gone = stack(), []
    assumptions = Assumptions(model)
    storages = [weakref.ref(w.untyped_storage(), gone.append) for w in model[0].proj.parameters()]
    change(model)
    assert len(gone) == count
    assert not assumptions.in_place()
    assert {r() is None for r in storages} == ({True} if count == 2 else {True, False})


def test_another_dtype_at_the_same_address_is_seen():
    model = stack().to(torch.bfloat16)
    assumptions = Assumptions(model)
    set_data(model[0].proj.weight, lambda w: w.view(torch.float16))
    assert not assumptions.same(model)


def test_a_forward_replaced_a_second_time_is_seen():
    model = stack()
    model[0].act.forward = torch.relu
    assumptions = Assumptions(model)
    model[0].act.forward = torch.tanh
    assert not assumptions.same(model)


LORA_CHANGES = {
    "scale": lambda layer: layer.set_scale("default", 0.5),
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "another active": lambda layer: layer.set_adapter("other"),
    "none active": lambda layer: layer._active_adapter.clear(),
}


@pytest.mark.parametrize("change", LORA_CHANGES.values(), ids=LORA_CHANGES)
def test_what_a_lora_layer_reads_from_python_is_watched(change):
    from peft import LoraConfig

    model = stack()
    layer = with_lora(model)
    layer.update_layer("other", 2, lora_alpha=2, config=LoraConfig(r=2))
    layer.set_adapter(["default"])
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    change(layer)
    assert not assumptions.same(model)


def test_unloading_lora_is_seen():
    model = stack()
    layer = with_lora(model)
    assumptions = Assumptions(model)
    model[0].proj = layer.get_base_layer()
    assert not assumptions.same(model)


def test_lora_loaded_into_an_eval_model_can_be_captured():
    model = stack()
    layer = with_lora(model)
    assert layer.training
    assert Assumptions(model).obstacle(model) is None


def test_lora_with_dropout_in_training_mode_cannot():
    model = stack()
    with_lora(model, lora_dropout=0.5)
    assert Assumptions(model).obstacle(model) == "training mode"
    model.eval()
    assert Assumptions(model).obstacle(model) is None


def test_a_lora_scale_that_is_a_tensor_counts_by_its_value():
    """As peft's scales for hot-swapping; a capture reads the value."""
    model = stack()
    layer = with_lora(model)
    layer.scaling["default"] = torch.tensor(2.0)
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    assert assumptions.obstacle(model) is None
    layer.scaling["default"].fill_(3.0)
    assert not assumptions.same(model)


def test_which_copy_of_a_trained_module_is_active_is_watched():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["proj"], modules_to_save=["norm"])
    model = get_peft_model(stack(), config).eval()
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    wrapper = next(m for m in model.modules() if type(m).__name__ == "ModulesToSaveWrapper")
    wrapper.enable_adapters(False)
    assert not assumptions.same(model)


def test_scripted_modules_are_an_obstacle():
    model = stack()
    model[0].act = torch.jit.trace(nn.Linear(8, 8).eval(), torch.ones(1, 8))
    assumptions = Assumptions(model)
    assert assumptions.obstacle(model) == "scripted modules"
    assert assumptions.same(model)
    model[0].act = nn.GELU().eval()
    assert not assumptions.same(model)


@pytest.mark.parametrize("where", [lambda m: m, lambda m: m[0].act], ids=["model", "module"])
def test_training_mode_and_hooks_are_obstacles_as_long_as_they_last(where):
    model = stack()
    place = where(model)
    place.training = True
    assert Assumptions(model).obstacle(model) == "training mode"
    place.training = False
    handle = place.register_forward_pre_hook(lambda *a: None)
    assumptions = Assumptions(model)
    assert assumptions.obstacle(model) == f"a hook on {type(place).__name__}"
    handle.remove()
    assert not assumptions.same(model) or assumptions.obstacle(model) is None
    assert Assumptions(model).obstacle(model) is None


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_accelerate_hooks_that_move_weights_are_obstacles(offload, wrapped):
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    model = stack()
    hook = AlignDevicesHook("cpu", offload=offload)
    add_hook_to_module(model[0].proj, SequentialHook(hook) if wrapped else hook)
    expected = "AlignDevicesHook on Linear" if offload else None
    assert Assumptions(model).obstacle(model) == expected


def test_model_offload_is_an_obstacle():
    from accelerate import cpu_offload_with_hook

    model, _ = cpu_offload_with_hook(stack(), "cpu")
    assert Assumptions(model).obstacle(model) == "CpuOffload on Sequential"


def test_diffusers_hooks_are_obstacles_but_an_empty_registry_is_none():
    from diffusers.hooks import HookRegistry, ModelHook

    model = stack()
    registries = [HookRegistry.check_if_exists_or_initialize(m) for m in (model, model[0])]
    for registry, name in zip(registries, ("Sequential", "Block"), strict=True):
        assumptions = Assumptions(model)
        assert assumptions.obstacle(model) is None
        registry.register_hook(ModelHook(), "cache")
        assert not assumptions.same(model) or assumptions.obstacle(model)
        assert Assumptions(model).obstacle(model) == f"a hook on {name}"
        registry.remove_hook("cache")


def test_weights_that_are_no_plain_tensors_are_an_obstacle():
    class Packed(nn.Parameter):
        pass

    model = stack()
    model[0].proj.weight = Packed(torch.ones(8, 8))
    assumptions = Assumptions(model)
    assert assumptions.obstacle(model) == "weights of type Packed"
    assert assumptions.same(model)


def test_the_attention_of_diffusers_is_watched():
    from diffusers.models.attention_processor import Attention

    model = nn.Sequential(Attention(8, heads=2, dim_head=4)).eval()
    processor = model[0].processor
    processor.scale = [1.0]
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    processor.scale[0] = 0.5
    assert not assumptions.same(model)
    assumptions = Assumptions(model)
    processor._attention_backend = "flash"
    assert not assumptions.same(model)
    assumptions = Assumptions(model)
    model[0].set_processor(type(processor)())
    assert not assumptions.same(model)


def test_the_attention_of_transformers_is_watched():
    from transformers import LlamaConfig, LlamaModel

    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    model = LlamaModel(LlamaConfig(num_hidden_layers=1, attn_implementation="sdpa", **size)).eval()
    assumptions = Assumptions(model)
    assert assumptions.same(model)
    model.set_attn_implementation("eager")
    assert not assumptions.same(model)
