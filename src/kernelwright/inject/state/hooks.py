"""What others have put on a module (hooks, forwards, processors, adapters), and what it implies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...library_internals import (
    ACCELERATE_HOOK,
    DIFFUSERS_HOOKS,
    HOOK_ATTRIBUTES,
    base_layer,
    diffusers_hooks,
    exchanges_tensors,
    has_library_hook,
    peft_layers,
)
from .class_code import FUNCTIONS, SIMPLE
from .side_effects import visible_effect

COMMON = frozenset(vars(nn.Module()))  # attributes that every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# attributes that are PyTorch's own, or hooks, which are checked separately
NOT_CALLED = COMMON.union(HOOK_ATTRIBUTES)
NO_SETTINGS = (nn.Module, Tensor, type, *FUNCTIONS)
# libraries whose modules are stateless, unless an argument or a hook has state
LIBRARIES = frozenset(("torch", "diffusers", "transformers", "peft", "accelerate", "kernelwright"))
ADVANCING = (Iterator, torch.Generator, random.Random)
MARK = "__kernelwright__"  # attribute that marks a forward as ours


def hooks_of(module: nn.Module) -> Iterator[dict]:
    """The dicts of hooks registered on a module."""
    own = vars(module)
    yield from (own[name] for name in HOOKS)
    if (hooks := diffusers_hooks(module)) is not None:
        yield hooks


def is_ours(forward: Any) -> bool:
    return type(forward) is MethodType and hasattr(forward.__func__, MARK)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks or a wrapped forward: then it must be called, not bypassed."""
    own = module.__dict__  # a block asks some twenty times, so nothing is called here
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or ACCELERATE_HOOK in own
        or DIFFUSERS_HOOKS in own
    ):
        return True
    return "forward" in own and not is_ours(own["forward"])


# PyTorch's own forwards: somebody may patch one of these classes later
PLAIN_KINDS = (nn.Linear, nn.GELU, nn.SiLU, nn.Dropout, nn.LayerNorm, nn.RMSNorm)
PLAIN_FORWARDS = {kind: kind.forward for kind in PLAIN_KINDS}


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this class of PyTorch, with PyTorch's own forward."""
    return type(module) is kind and kind.forward is PLAIN_FORWARDS[kind]


def why_run_once(root: nn.Module) -> str | None:
    """Why a module must not run twice where eager runs it once, or None if it may: something inside
    it has, or may have, state or side effects."""
    for module in root.modules():
        if module is not root and is_hooked(module):
            return f"a hook or another forward on {type(module).__name__}"
        if effect := effect_of(module) or effect_of_class(type(module)):
            return effect
        if exchanges_tensors(module):  # what one process runs twice, another may run once
            return "its attention waits for other processes"
    return None


def effect_of_class(kind: type[nn.Module]) -> str | None:
    """What the forward of a class that no library has does beside computing, or None."""
    return None if is_of_libraries(kind.forward) else visible_effect(kind, is_of_libraries)


def effect_of(module: nn.Module) -> str | None:
    """What others have put into a library's module that may have side effects, or None."""
    name, own = type(module).__name__, vars(module)
    # accelerate and diffusers call their hooks from a forward of their own
    replaced = "forward" in own and not is_ours(own["forward"])
    if replaced and not has_library_hook(module):
        return f"another forward on {name}"
    of_library = type(module).__module__.partition(".")[0] in LIBRARIES
    if of_library and not is_of_libraries(type(module).forward):
        return f"another forward on the class {name}"
    for key, value in own.items():
        if key in NOT_CALLED or value is None or type(value) in SIMPLE:
            continue
        if _changes_unseen(value):
            return f"a {type(value).__name__} on {name}"
        if not callable(value) or not has_settings(value):
            continue
        runs = value if isinstance(value, partial) else type(value).__call__
        if not is_of_libraries(runs):
            return f"a {type(value).__name__} on {name}"
    return None


def _changes_unseen(value: Any) -> bool:
    """Whether using an attribute changes it, as iterators and generators of random numbers; or it
    can be written to without a version counter, as an array."""
    if isinstance(value, ADVANCING):
        return True
    kind = type(value)
    return kind.__name__ == "ndarray" or kind.__module__.startswith("numpy.random")


def is_of_libraries(function: Any) -> bool:
    if isinstance(function, partial):
        return is_of_libraries(function.func)
    if isinstance(function, BuiltinFunctionType):  # no method of a list, but a function of torch
        return isinstance(function.__self__, ModuleType | type | None)
    place = getattr(function, "__globals__", {}).get("__name__") or getattr(
        function, "__module__", None
    )
    return (place or "").partition(".")[0] in LIBRARIES


def inside_adapters(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Layers of peft and everything in them: we always call these, and never read their parts."""
    for layer in peft_layers(modules):
        yield from layer.modules()


def base_layers(root: nn.Module) -> set[int]:
    """The ids of layers that are wrapped by an adapter."""
    inner = map(base_layer, root.modules())
    return {id(layer) for layer in inner if layer is not None}


def has_settings(value: Any) -> bool:
    """Whether an attribute is an object whose own attributes a forward may depend on: a processor
    of diffusers, a config of transformers, an activation that is no module."""
    return hasattr(value, "__dict__") and not isinstance(value, NO_SETTINGS)
