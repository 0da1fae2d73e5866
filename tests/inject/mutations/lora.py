"""Adapters of peft: loaded, scaled, switched, fused, exchanged in place, unloaded."""

import torch

from .core import NotHere, noise, on_models

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "query_key_value")


def layers(model):
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]


def loaded(side):
    found = layers(side.model)
    if not found:
        raise NotHere
    return found


@on_models("lora.load")
def load(side, draw):
    from peft import LoraConfig

    model = side.model
    if any(p.is_meta for p in model.parameters()):
        raise NotHere  # offload: peft leaves the adapter there as well, and its values are gone
    wanted = draw.choice((TARGETS, TARGETS[:3], TARGETS[:1])) + LANGUAGE
    targets = sorted({t for t in wanted for n, _ in model.named_modules() if n.endswith(t)})
    if not targets or not hasattr(model, "add_adapter"):
        raise NotHere
    name = f"adapter_{len(getattr(model, 'peft_config', {}))}"
    torch.manual_seed(draw.randrange(2**31))
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config, adapter_name=name)
    model.train(model.training)  # adapters come in training mode


@on_models("lora.scale", after=("lora.load",))
def scale(side, draw):
    factor = draw.choice((0.3, 0.5, 2.0))
    for layer in loaded(side):
        for name in layer.active_adapters:
            layer.set_scale(name, factor)


@on_models("lora.set_adapters", after=("lora.load",))
def weights_of_adapters(side, draw):
    loaded(side)
    names = list(side.model.peft_config)
    if not hasattr(side.model, "set_adapters"):
        raise NotHere
    side.model.set_adapters(names, [draw.choice((0.25, 1.0)) for _ in names])


@on_models("lora.disable", after=("lora.load",))
def disable(side, draw):
    loaded(side)
    off = getattr(side.model, "disable_lora", None) or side.model.disable_adapters
    off()

    def undo(side):
        on = getattr(side.model, "enable_lora", None) or side.model.enable_adapters
        on()

    return undo


@on_models("lora.fuse", after=("lora.load",))
def fuse(side, draw):
    found = loaded(side)
    if any(layer.merged for layer in found):
        raise NotHere
    if hasattr(side.model, "fuse_lora"):
        side.model.fuse_lora()
    else:
        for layer in found:
            layer.merge()

    def undo(side):
        if hasattr(side.model, "unfuse_lora"):
            side.model.unfuse_lora()
        else:
            for layer in layers(side.model):
                layer.unmerge()

    return undo


@on_models("lora.hot swap", after=("lora.load",))
def exchange(side, draw):
    """The adapter of another style in the memory of this one, as hot-swapping does it."""
    with torch.no_grad():
        for layer in loaded(side):
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.weight.copy_(noise(draw, part.weight) * 0.05)


@on_models("lora.hot swap through .data", after=("lora.load",))
def exchange_data(side, draw):
    for layer in loaded(side):
        for part in layer.lora_B.values():
            part.weight.data.copy_(noise(draw, part.weight) * 0.05)


@on_models("lora.unload", after=("lora.load",))
def unload(side, draw):
    loaded(side)
    if hasattr(side.model, "unload_lora"):
        side.model.unload_lora()
    else:
        side.model.delete_adapter(list(side.model.peft_config))
