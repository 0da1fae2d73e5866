"""Weights that change: in place, behind the back of PyTorch's version counter, or as objects."""

import torch
from torch import nn

from .core import NotHere, noise, on_models


def has_weight(module):
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def is_linear(module):
    return isinstance(module, nn.Linear)


def is_norm(module):
    return type(module).__name__.endswith("Norm") and has_weight(module)


def weight(side, draw, wanted=has_weight):
    """A weight of some module, norm or layer."""
    module = side.at(side.pick(draw, wanted))
    names = [n for n, p in module._parameters.items() if p is not None and p.is_floating_point()]
    if not names:
        raise NotHere
    name = draw.choice(names)
    return module, name, module._parameters[name]


def nearby(draw, like):
    """Other values of the same magnitude. Of weights on a GPU too, the host computes it: one of an
    fp8 layer may lie on the CPU on one side only."""
    scale = like.detach().cpu().float().std().nan_to_num(1).item() or 1.0
    return like.detach() + noise(draw, like) * (scale / 2)


@on_models("weights.copy_")
def copied(side, draw):
    _, _, w = weight(side, draw)
    with torch.no_grad():
        w.copy_(nearby(draw, w))


@on_models("weights.mul_")
def scaled(side, draw):
    _, _, w = weight(side, draw)
    with torch.no_grad():
        w.mul_(1.25)


@on_models("weights.all mul_")
def all_scaled(side, draw):
    with torch.no_grad():
        for w in side.model.parameters():
            if w.is_floating_point():
                w.mul_(1.02)


@on_models("weights.written through .data")
def through_data(side, draw):
    _, _, w = weight(side, draw)
    w.data.mul_(0.75)


@on_models("weights.another .data")
def other_data(side, draw):
    _, _, w = weight(side, draw)
    w.data = nearby(draw, w)


@on_models("weights.written through the storage")
def through_storage(side, draw):
    _, _, w = weight(side, draw)
    with torch.no_grad():
        over(w).mul_(0.5)


def over(tensor):
    """A tensor over the same memory with a version counter of its own."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return empty.set_(tensor.untyped_storage(), *place)


@on_models("weights.written through numpy")
def through_numpy(side, draw):
    _, _, w = weight(side, draw)
    if w.device.type != "cpu" or w.dtype not in (torch.float32, torch.float64):
        raise NotHere
    array = w.detach().numpy()
    array *= 1.5


@on_models("weights.one row")
def row(side, draw):
    _, _, w = weight(side, draw, is_linear)
    with torch.no_grad():
        w[draw.randrange(len(w))].fill_(0.125)


@on_models("weights.one column")
def column(side, draw):
    _, _, w = weight(side, draw, is_linear)
    with torch.no_grad():
        w[..., draw.randrange(w.shape[-1])] = -0.25


@on_models("weights.a Parameter replaced")
def replaced(side, draw):
    module, name, w = weight(side, draw)
    setattr(module, name, nn.Parameter(nearby(draw, w), requires_grad=w.requires_grad))


@on_models("weights.a Parameter replaced, the old one freed")
def replaced_at_the_same_place(side, draw):
    """The allocator may reuse the address of the old one."""
    module, name, w = weight(side, draw)
    values, wanted = nearby(draw, w).clone(), w.requires_grad
    delattr(module, name)
    del w
    module.register_parameter(name, nn.Parameter(values.clone(), requires_grad=wanted))


@on_models("weights.swap_tensors")
def swapped(side, draw):
    _, _, w = weight(side, draw)
    torch.utils.swap_tensors(w, nn.Parameter(nearby(draw, w), requires_grad=w.requires_grad))


@on_models("weights.tied")
def tied(side, draw):
    module = side.at(side.pick(draw, is_linear))
    same = side.modules(
        lambda m: is_linear(m) and m is not module and m.weight.shape == module.weight.shape
    )
    if not same:
        raise NotHere
    side.at(draw.choice(same)).weight = module.weight


@on_models("weights.a bias dropped")
def without_bias(side, draw):
    module = side.at(side.pick(draw, lambda m: m._parameters.get("bias") is not None))
    before = module.bias
    module.bias = None

    def undo(side):
        module.bias = before

    return undo


@on_models("weights.a buffer written")
def buffer(side, draw):
    found = [b for _, b in side.model.named_buffers() if b.is_floating_point() and b.numel() > 1]
    if not found:
        raise NotHere
    with torch.no_grad():
        draw.choice(found).mul_(0.9)


@on_models("weights.load_state_dict")
def loaded(side, draw, **how):
    names = sorted(side.model.state_dict())
    changed = set(draw.sample(names, max(len(names) // 4, 1)))
    state = {
        n: v * 1.125 if n in changed and v.is_floating_point() else v.clone()
        for n, v in side.model.state_dict().items()
    }
    side.model.load_state_dict(state, **how)


@on_models("weights.load_state_dict(assign=True)")
def assigned(side, draw):
    loaded(side, draw, assign=True)


@on_models("weights.requires_grad", after=("calls.gradients",))
def frozen(side, draw):
    """Only some kinds of parameter are trained: biases, weights of norms, or all."""
    part = draw.choice(("bias", "norm", "to_q", ""))
    for name, parameter in side.model.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(part in name)
