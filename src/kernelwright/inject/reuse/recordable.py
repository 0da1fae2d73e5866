"""Which blocks may run as a recording of their forward, and what the recording depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import pytree
from ...fuser.cache_recording import changes_size
from ...fuser.joint_recording import Joint
from ...fuser.recording import Recording
from ...library_internals import (
    CACHE_ARGUMENT,
    exchanges_tensors,
    is_kv_cache,
    is_shared_states,
    peft_layers,
)
from ..runtime.forwards import hooked
from ..runtime.input_key import held_by
from ..state.hooks import effect_of, effect_of_class

# kernels for each op from which on a recording is not used: PyTorch's own are as fast
WORTH = 0.75


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a recording depends on: how inputs lie in memory, which are one object, and the value of
    all others."""
    ids = tuple(map(id, (*args, *kwargs.values())))
    grows = is_kv_cache(kwargs.get(CACHE_ARGUMENT))
    named = [
        (k, _key_of_any_size(v) if grows and changes_size(k, v) else _key_of(v))
        for k, v in kwargs.items()
    ]
    return tuple(map(_key_of, args)), tuple(named), tuple(map(ids.index, ids))


def shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of the inputs, and the value of what is no tensor."""
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple([v.shape if isinstance(v, Tensor) else _key_of(v) for v in leaves])


def _key_of_any_size(value: Any) -> Any:
    if is_shared_states(value):
        return type(value), tuple([(k, _key_of_any_size(v)) for k, v in value.items()])
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key_of_any_size(v) for v in value])
    if not isinstance(value, Tensor):
        return _key_of(value)
    return type(value), value.ndim, value.dtype, value.device


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        start = 0 if value.is_meta else value.data_ptr() & 15
        return type(value), value.shape, value.stride(), value.dtype, value.device, start
    if value is None:
        return value
    if isinstance(value, (tuple, list)):  # a union of them would be made anew for every call
        return type(value), tuple([_key_of(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _key_of(v)) for k, v in value.items()])
    if isinstance(value, float):
        return float, repr(value)  # 0.0 == -0.0, but they may give other results
    if isinstance(value, (bool, int, str)):
        return type(value), value
    if is_shared_states(value):
        return type(value), _key_of(value.data)
    return type(value)


def little_to_gain(ops: int, kernels: int) -> str | None:
    """Why a recording is not worth using, or None if it is."""
    few = kernels > WORTH * ops
    return f"little to gain: {ops} ops would be {kernels} kernels" if few else None


def opaque_in(root: nn.Module) -> tuple[nn.Module, ...]:
    """Layers that are called, not read: adapters, and linear layers with a hook, a forward of
    others or a weight that a quantiser has wrapped."""
    found: dict[int, nn.Module] = {id(m): m for m in peft_layers(root.modules()) if m is not root}
    inside = {id(i) for m in found.values() for i in m.modules()}
    for module in root.modules():
        if module is root or id(module) in inside or not isinstance(module, nn.Linear):
            continue
        # not module.weight: a parametrization would be computed
        weight = module._parameters.get("weight")
        wrapped = type(weight) not in (type(None), nn.Parameter)
        if wrapped or hooked(module) or effect_of(module) is not None:
            found[id(module)] = module
    return tuple(found.values())


def remembers(layer: nn.Module) -> bool:
    """Whether a layer may do more than return a result."""
    return any(hooked(m) or effect_of(m) is not None for m in layer.modules())


def waits(root: nn.Module) -> bool:
    """Whether a module must run as often as in other processes, which exchange tensors with it."""
    return any(map(exchanges_tensors, root.modules()))


def why_not(root: nn.Module, opaque: Sequence[nn.Module]) -> str | None:
    """Why the forward of a module must not be replaced by a recording of it, or None."""
    called = {id(m) for layer in opaque for m in layer.modules()}
    for module in root.modules():
        if id(module) in called:
            continue
        if module is not root and hooked(module):
            return f"a hook or another forward on {type(module).__name__}"
        if effect := effect_of(module) or effect_of_class(type(module)):
            return effect
    return None


def unknown_constant(root: nn.Module, made: Recording | Joint) -> str | None:
    """Why a tensor that the forward reads may change unnoticed, or None."""
    aten = torch.ops.aten
    nodes = {n.name: n for n in made.graph.nodes}
    held = set(map(id, held_by(root)))
    for name, tensor in made.constants.items():
        # a number written in the forward becomes a tensor that nothing else holds
        fresh = all(u.target is aten.lift_fresh_copy.default for u in nodes[name].users)
        if not fresh and id(tensor) not in held:
            return "a tensor that is neither given nor an attribute"
    return None
