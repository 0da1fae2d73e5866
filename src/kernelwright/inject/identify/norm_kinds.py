"""Which norm a module is: found by trying it, not by its name.

A module that looks like a norm is given small random rows, with random weights in place of its
own, and its output is compared bit for bit with the formulas the kernels know. Gemma's
`1 + weight`, a gated norm or a hidden bias come out different and are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...backends.torch_internals import mark_constant
from ...ops.row import default_eps as row_eps
from ...ops.row.reference import eager_norm
from ..state.class_code import code_of
from ..state.hooks import PLAIN_FORWARDS
from ..state.module_state import State
from .structure import structure_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm:
    """A norm that has kernels. Weights and eps are read from the module at each call, so that
    changes take effect."""

    kind: str  # "rms" or "layer"
    chain: str  # the eager steps it runs: "torch", "diffusers", "transformers" or "wan"
    eps: str  # the name of the module's attribute


@mark_constant
def default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """What F.rms_norm adds if eps is None. A function of its own: torch.compile unwraps a cache and
    would lose `given`."""
    return row_eps.default_eps(dtype, device)


_found: WeakKeyDictionary[nn.Module, tuple[State, Norm | str]] = WeakKeyDictionary()
# by structure and by the code of the class, which may be patched
_structures: dict[Any, Norm | str] = {}
MAX_STRUCTURES = 256

Key = tuple[type, bool, bool]


def key(module: nn.Module) -> Key:
    """The kind of a module: its class, and whether it has a weight and a bias."""
    return (
        type(module),
        getattr(module, "weight", None) is not None,
        getattr(module, "bias", None) is not None,
    )


def survey(modules: Iterable[nn.Module]) -> dict[Key, Norm | str]:
    """The norms among `modules`, by kind."""
    kinds: dict[Key, Norm | str] = {}
    for module in modules:
        if looks_like_norm(module):
            found, known = describe(module), kinds.get(key(module))
            kinds[key(module)] = (
                found
                if known in (None, found)
                else "modules of this class compute different things"
            )
    return kinds


def describe(module: nn.Module) -> Norm | str:
    """The norm that a module is, or why there is no kernel for it."""
    known = _found.get(module)
    if known is None or not known[0].holds(module):
        known = _found[module] = State(module), _of_structure(module)
    return known[1]


def _of_structure(module: nn.Module) -> Norm | str:
    """The same for all modules that do the same with their weights: one of them is probed."""
    key = structure_of(module), code_of(type(module))
    found = _structures.get(key)
    if found is None:
        if len(_structures) >= MAX_STRUCTURES:
            _structures.clear()
        found = _structures[key] = _identify(module)
    return found


def looks_like_norm(module: nn.Module) -> bool:
    """A leaf whose class is named a norm, except norms over other dimensions."""
    name = type(module).__name__
    return (
        ("Norm" in name or "norm" in name.lower())
        and not any(module.children())
        and not isinstance(module, _OTHER_AXES)
    )


_OTHER_AXES = (
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
    nn.CrossMapLRN2d,
)


def _identify(module: nn.Module) -> Norm | str:
    if any(module.children()):
        return "a norm with modules inside, such as a parametrization"
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    if extra := parameters.keys() - {"weight", "bias"}:
        return f"a norm with {', '.join(sorted(extra))}"
    if any(b is not None for b in module._buffers.values()):
        return "a norm with buffers"
    if any(p.ndim != 1 for p in parameters.values()):
        return "a norm over more than the last dimension"
    forward = type(module).forward
    if isinstance(module, nn.RMSNorm) and forward is PLAIN_FORWARDS[nn.RMSNorm]:
        return _over_last(module, "rms")
    if isinstance(module, nn.LayerNorm) and forward is PLAIN_FORWARDS[nn.LayerNorm]:
        return _over_last(module, "layer")
    return _probe(module, parameters)


def _over_last(module: Any, kind: str) -> Norm | str:
    if len(module.normalized_shape) != 1:
        return "a norm over more than the last dimension"
    return Norm(kind, "torch", "eps")


def _probe(module: nn.Module, parameters: Mapping[str, Tensor]) -> Norm | str:
    names = ("variance_epsilon", "eps", "epsilon")
    name = next((n for n in names if isinstance(getattr(module, n, None), float)), None)
    if name is None:
        return "it has no eps that could be read"
    eps = getattr(module, name)
    width = next((p.shape[0] for p in parameters.values()), None) or _width(module)
    # the RMSNorms of the two libraries differ only where dtypes are mixed
    libraries = ["diffusers", "transformers"]
    if type(module).__module__.startswith("transformers."):
        libraries.reverse()
    candidates = [
        (Norm(kind, chain, name), partial(_formula, kind, chain, eps))
        for kind, chain in (
            *(("rms", library) for library in libraries),
            ("layer", "wan"),
            ("layer", "torch"),
        )
        if kind == "layer" or "bias" not in parameters
    ]
    trials = [_trial(module, parameters, width, dtype) for dtype in DTYPES]
    if any(t is None for t in trials):
        return "its forward takes more than the rows"
    for norm, formula in candidates:
        if all(_same(t, formula) for t in trials):
            return norm
    x, weight, _, y = trials[0]  # type: ignore[misc]
    if weight is not None and y.shape == x.shape:
        plain = eager_norm(x, "transformers", "rms", None, None, eps)
        if torch.allclose(y, plain * (1 + weight), rtol=1e-4, atol=1e-4):
            return "it multiplies by 1 + weight, not by weight"
    return "its output is not that of a plain RMSNorm or LayerNorm"


def _width(module: nn.Module) -> int:
    for name in ("normalized_shape", "dim"):
        shape = getattr(module, name, None)
        if isinstance(shape, int) and shape > 0:  # else it is an axis, as in diffusers' LpNorm
            return shape
        if isinstance(shape, tuple | list | torch.Size) and len(shape) == 1:
            return int(shape[0])
    return 128


Trial = tuple[Tensor, Tensor | None, Tensor | None, Tensor]


def _trial(
    module: nn.Module, parameters: Mapping[str, Tensor], width: int, dtype: torch.dtype
) -> Trial | None:
    """Random rows, weight and bias, and the output of the module's own forward for them."""
    generator = torch.Generator().manual_seed(width)
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    made = {
        name: nn.Parameter(torch.randn(width, generator=generator).to(dtype), requires_grad=False)
        for name in parameters
    }
    twin._parameters = {n: made.get(n) for n in module._parameters}
    x = (torch.randn(5, width, generator=generator) * 2 + 0.5).to(dtype)
    try:
        with torch.no_grad():
            y = type(module).forward(twin, x)
    except Exception:  # whatever it raised, a norm that needs more than rows has no kernel
        return None
    if not isinstance(y, Tensor):
        return None
    return x, made.get("weight"), made.get("bias"), y


def _same(trial: Trial | None, formula: Callable[..., Tensor]) -> bool:
    assert trial is not None
    x, weight, bias, y = trial
    return y.dtype == x.dtype and y.shape == x.shape and torch.equal(formula(x, weight, bias), y)


def _formula(
    kind: str, chain: str, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    if kind == "layer" and chain == "torch":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return eager_norm(x, chain, kind, weight, bias, eps).type_as(x)
