"""Writing a module's forward down as a graph of ATen ops, for one signature of its inputs.

Parameters and buffers are inputs of the graph, so that one graph serves every module of a class.
Linear layers, attention and F.rms_norm stay single ops, whatever PyTorch makes of them. What cannot
be written down raises `CannotRecord` with the reason: a value read on the host, random numbers,
tensors of a class of their own, writing to an input.

Layers that must be called rather than read (those with hooks or adapters) are *opaque*: a call of
one is a single op of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ..backends.torch_internals import any_autocast, pytree
from ..ops import library
from ..ops.row.default_eps import default_eps
from .cache_recording import CachedCalls, Place, recorded_calls_of_caches
from .cached_attention import AttentionCall, CacheUpdate
from .module_twin import twin_of
from .parallel_attention import ParallelCall, recorded_calls
from .recorded_ops import ATTENTION, LAYER, LINEAR, RMS_NORM, opaque_layers, sdp_backends
from .tracing import trace
from .watched_forward import CannotRecord, WatchedForward

# how to find a tensor among arguments: what to apply, one after the other
Path = tuple[Callable[[Any], Any], ...]


WRITES_TO_BUFFERS = "it writes to its buffers"
# ops that exchange tensors; "_c10d_functional" is another name of the second
COLLECTIVES = ("c10d", "c10d_functional")


class _Outside(threading.local):
    backends: Sequence[int] = ()  # of attention, outside of the forward that is recorded


_outside = _Outside()


class _Opaque(nn.Module):
    """Stands for a layer while the module around it is recorded."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        vars(self)["_layer"], vars(self)["_number"] = layer, number

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise CannotRecord(f"{type(self._layer).__name__} takes more than one tensor")
        return LAYER(args[0], self._number)


def _stand_in(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Replace opaque layers inside a module that is to be recorded."""
    numbers = {id(layer): i for i, layer in enumerate(layers)}
    put: list[tuple[dict[str, Any], str, nn.Module]] = []
    for parent in list(module.modules()) if layers else ():
        for name, child in parent._modules.items():
            if id(child) in numbers and child is not None:
                put.append((parent._modules, name, child))
    for holder, name, child in put:
        holder[name] = _Opaque(child, numbers[id(child)])


class _Whole(TorchFunctionMode):
    """Keeps functions whole that PyTorch would write down as their parts."""

    def __init__(self, cached: CachedCalls | None = None) -> None:
        super().__init__()
        self._cached = cached

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._cached is not None:
            found = self._cached.called(function, args, kwargs)
            if found is not NotImplemented:
                return found
        if (kept := _KEPT.get(function)) is not None:
            return kept(*args, **kwargs)
        return function(*args, **kwargs)


def _without_draws(op: Any) -> None:
    """End a recording before random numbers are drawn: the forward that then runs as it did draws
    them itself, and must draw the same."""
    if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        raise CannotRecord(f"random numbers ({op})")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return LINEAR(input, weight, bias)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise CannotRecord("attention with dropout")
    chosen = sdp_backends()
    if chosen == _outside.backends:
        chosen = []
    return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, chosen)


def _rms(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)  # PyTorch runs it in parts, too
    if eps is None:
        eps = _eps[input.dtype, input.device]
    return RMS_NORM(input, list(normalized_shape), weight, eps)


# what F.rms_norm adds if it is given no eps; it cannot be asked while a forward is recorded
_eps: dict[tuple[torch.dtype, torch.device], float] = {}


def _find_eps(tensors: Sequence[Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for device in {t.device for t in tensors}:
            if (dtype, device) not in _eps:
                _eps[dtype, device] = default_eps(dtype, device)


_KEPT: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _sdpa,
    F.rms_norm: _rms,
    torch.rms_norm: _rms,
}


@dataclass
class Recording:
    """A graph, and how the inputs of a call become its inputs."""

    graph: fx.Graph
    weights: tuple[str, ...]  # names of the parameters and buffers that come first
    paths: tuple[Path, ...]  # how to find each tensor in (args, kwargs)
    returns: Any  # the structure of the result
    # tensors that the forward reads and is not given: attributes that are no buffers, globals
    constants: dict[str, Tensor]
    results: list[Any] = field(default_factory=list)  # of this very run; taken out by its user
    parallel: dict[int, ParallelCall] = field(default_factory=dict)  # by their number in the graph
    handed: int = 0  # how many of the inputs, the last ones, the block before has made for this one
    # what it calls of caches, by number
    cached: Sequence[CacheUpdate | AttentionCall] = ()
    # where it is given states that layers share: what it leaves there comes after its result
    shared: Sequence[Place] = ()

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        named = weights_of(module)
        return [*(named[n] for n in self.weights), *self.given(args, kwargs)]

    def __post_init__(self) -> None:
        count = self.returns.num_leaves
        if self.returns == pytree.tree_structure(0):
            self.result: Callable[[list[Any]], Any] = itemgetter(0)
        elif self.returns == pytree.tree_structure((0,) * count):
            self.result = tuple
        else:
            self.result = partial(pytree.tree_unflatten, treespec=self.returns)

    def finish(self, results: list[Any], args: Any, kwargs: Any) -> Any:
        """The result of a call, from what the graph returns."""
        if not self.shared:
            return self.result(results)
        result, written = self.result(results)
        for (root, key), found in zip(self.shared, written, strict=True):
            (args, kwargs)[root][key].update(found)
        return result

    def given(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors of a call, without flattening it: every block is called so."""
        found: list[Any] = [(args, kwargs)] * len(self.paths)
        for i, path in enumerate(self.paths):
            for step in path:
                found[i] = step(found[i])
        return found


def rehearse(module: nn.Module, args: Any, kwargs: Any, opaque: Sequence[nn.Module]) -> None:
    """Raise CannotRecord if the forward of a module cannot be recorded, without calling its opaque
    layers, which may count their calls."""
    record(module, args, kwargs, opaque, real=False)


def record(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    opaque: Sequence[nn.Module] = (),
    *,
    real: bool = True,
) -> Recording:
    """Run the forward of a module once, and write down what it does."""
    twin = twin_of(module, opaque)
    cached = CachedCalls.of(module, twin, args, kwargs)
    inputs = (args, kwargs) if cached is None else cached.inputs
    # attention is called anew where a cache decides how long its keys are
    calls = cached if cached is not None and cached.has_cache else None
    leaves, structure = pytree.tree_flatten(inputs)
    positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    weights: dict[str, Tensor] = {}
    returned: list[Any] = []
    results: list[Any] = []

    def run(*tensors: Tensor) -> Any:
        names = [f"module.{name}" for name in weights]
        named = dict(zip(names, tensors[: len(weights)], strict=True))
        given = list(leaves)
        for place, tensor in zip(positions, tensors[len(weights) :], strict=True):
            given[place] = tensor
        a, k = pytree.tree_unflatten(given, structure)
        if cached is not None:
            a, k = cached.given(a, k)
        with _Whole(calls):
            result = torch.func.functional_call(WatchedForward(twin), named, a, k)
        if cached is not None:
            cached.results = pytree.tree_leaves(result)
            if cached.shared:
                result = result, cached.written
        outputs, spec = pytree.tree_flatten(result)
        returned[:] = [spec]
        return outputs

    functional = torch.func.functionalize(run, remove="mutations")

    def kept(*tensors: Tensor) -> Any:
        results[:] = functional(*tensors)
        return list(results)

    if any_autocast():
        raise CannotRecord("autocast")
    _stand_in(twin, opaque)
    weights.update(weights_of(twin))
    with opaque_layers(opaque), recorded_calls() as parallel, recorded_calls_of_caches(calls):
        _outside.backends = sdp_backends()
        tensors = [*weights.values(), *(leaves[i] for i in positions)]
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter, nn.Buffer):
                raise CannotRecord(f"a tensor of the class {type(t).__name__}")
        _find_eps(tensors)
        try:
            with torch.inference_mode(False), torch.no_grad():
                parameters = {id(p) for p in twin.parameters()}
                # not the parameters themselves: tracing leaves weak references to what it is given,
                # and torch.utils.swap_tensors refuses tensors that have some
                given = [t.detach() if id(t) in parameters else copied(t) for t in tensors]
                made = trace(kept, given, _without_draws, real=real)
        except CannotRecord:
            raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotRecord(str(error).strip().partition("\n")[0]) from error
    graph, constants = made.graph, made.constants
    if any(constant is w for constant in constants.values() for w in weights.values()):
        raise CannotRecord("a weight that is not read from its own module")
    for node in graph.nodes:
        if getattr(node.target, "namespace", "").endswith(COLLECTIVES):
            raise CannotRecord(f"it exchanges tensors with other processes ({node.target})")
        if _writes_to_input(node):
            raise CannotRecord("it writes to its inputs")
        if library.is_another_object(node.target):
            raise CannotRecord(f"torch.ops was cleared ({node.target})")
    if module.training and not all(map(_is_unchanged, given, tensors)):
        raise CannotRecord(WRITES_TO_BUFFERS)
    graph.eliminate_dead_code()
    if cached is not None and (why := cached.why_not(graph)) is not None:
        raise CannotRecord(why)
    return Recording(
        *(graph, tuple(weights), paths_of(inputs), returned[0], constants, results, parallel),
        cached=() if cached is None else cached.made,
        shared=() if cached is None else cached.shared,
    )


def _is_unchanged(copy: Tensor, t: Tensor) -> bool:
    """Whether a buffer was left as it was: in training mode batch norm writes to its own, and its
    op does not say so."""
    shared = copy.data_ptr() == t.data_ptr()
    return shared or torch.equal(copy, t) or bool(((copy == t) | t.isnan()).all())


def paths_of(tree: Any) -> tuple[Path, ...]:
    """How to find each tensor in a tree of containers."""
    found, _ = pytree.tree_flatten_with_path(tree)
    return tuple(tuple(map(_step, keys)) for keys, leaf in found if isinstance(leaf, Tensor))


def _step(key: Any) -> Callable[[Any], Any]:
    if isinstance(key, pytree.GetAttrKey):
        return attrgetter(key.name)
    return itemgetter(key.idx if isinstance(key, pytree.SequenceKey) else key.key)


def _writes_to_input(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or not node.args:
        return False
    first = node.args[0]
    return isinstance(first, fx.Node) and first.op == "placeholder"


def copied(t: Tensor) -> Tensor:
    """The same values in the same layout, for a forward that may turn out to write to them: the
    module's own forward is then the only one that does."""
    repeats = any(
        stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)
    )
    if repeats or t.is_conj() or t.is_neg():
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
