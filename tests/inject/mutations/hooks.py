"""Hooks that observe or change values: on modules, on all modules, and parametrizations."""

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize

from .core import NotHere, on_models, on_world
from .parts import WRAPPED, scaled
from .weights import has_weight, is_linear, is_norm


def anywhere(side, draw):
    name = side.pick(draw, WRAPPED[draw.choice(list(WRAPPED))])
    return name, side.at(name)


def removal(handle):
    return lambda side: handle.remove()


def counted(seen, name):
    """Counts its calls and changes nothing."""

    def hook(*given):
        seen[name] += 1

    return hook


@on_models("hooks.forward hook that looks on")
def looking(side, draw):
    name, module = anywhere(side, draw)
    return removal(module.register_forward_hook(counted(side.seen, f"{name} hook")))


@on_models("hooks.forward hook that changes the result")
def changing(side, draw):
    _, module = anywhere(side, draw)
    return removal(module.register_forward_hook(lambda m, args, out: scaled(out, 1.1)))


@on_models("hooks.forward hook on all modules")
def everywhere(side, draw):
    handles = [
        m.register_forward_hook(counted(side.seen, f"{n} hook"))
        for n, m in side.model.named_modules()
    ]

    def undo(side):
        for handle in handles:
            handle.remove()

    return undo


@on_models("hooks.forward pre-hook")
def before(side, draw):
    _, module = anywhere(side, draw)

    def hook(module, args, kwargs):
        if not args:
            return None
        return ((args[0] * 1.1, *args[1:]), kwargs)

    return removal(module.register_forward_pre_hook(hook, with_kwargs=True))


@on_models("hooks.full backward hook", after=("calls.gradients",))
def backward(side, draw):
    name, module = anywhere(side, draw)
    return removal(module.register_full_backward_hook(counted(side.seen, f"{name} backward")))


@on_models("hooks.full backward hook on all modules", after=("calls.gradients",))
def backward_everywhere(side, draw):
    handles = [
        m.register_full_backward_hook(counted(side.seen, f"{n} backward"))
        for n, m in side.model.named_modules()
    ]

    def undo(side):
        for handle in handles:
            handle.remove()

    return undo


@on_models("hooks.gradient hook of a parameter", after=("calls.gradients",), exact_only=True)
def gradient(side, draw):
    names = [n for n, p in side.model.named_parameters() if p.requires_grad]
    if not names:
        raise NotHere
    parameter = side.model.get_parameter(draw.choice(names))
    return removal(parameter.register_hook(lambda grad: grad * 2))


def of(side, factor):
    """A hook for the modules of one side, as the process has one registry for all."""

    def hook(module, args, out):
        # the model may have been replaced by a copy
        inside = any(module is m for m in side.model.modules())
        if inside and not list(module.children()):
            side.seen[f"global {type(module).__name__}"] += 1
            return scaled(out, factor) if isinstance(module, nn.Linear) else None
        return None

    return hook


@on_models("hooks.global forward hook", exact_only=True)
def global_forward(side, draw):
    """On the models' own modules only, so that each side has one."""
    factor = draw.choice((1.0, 1.125))
    handle = global_hooks.register_module_forward_hook(of(side, factor))
    side.handles.append(handle)
    return removal(handle)


@on_world("hooks.global forward pre-hook")
def global_before(world, draw):
    def hook(module, args):
        if isinstance(module, nn.Linear) and args:
            return (args[0] * 1.0625, *args[1:])
        return None

    return global_hooks.register_module_forward_pre_hook(hook).remove


class Raised(nn.Module):
    def forward(self, weight):
        return weight * 1.5 + 0.125


def refuse_offloaded(module):
    """accelerate does not load what a parametrization has put in the place of an offloaded weight:
    eager itself would then read what the memory held before."""
    if module.weight.is_meta:
        raise NotHere


@on_models("hooks.parametrization")
def parametrization(side, draw):
    name = side.pick(draw, draw.choice((is_linear, is_norm, has_weight)))
    refuse_offloaded(side.at(name))
    parametrize.register_parametrization(side.at(name), "weight", Raised())

    def undo(side):
        parametrize.remove_parametrizations(side.at(name), "weight")

    return undo


@on_models("hooks.weight_norm")
def weight_norm(side, draw):
    name = side.pick(draw, is_linear)
    refuse_offloaded(side.at(name))
    parametrizations.weight_norm(side.at(name))

    def undo(side):
        parametrize.remove_parametrizations(side.at(name), "weight")

    return undo
