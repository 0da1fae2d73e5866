"""What a forward that is recorded does with a key-value cache among its inputs, or with states that
layers share.

Something else stands in the place of the cache, and of the attention functions that the forward
asks transformers for: it runs their calls as ops of the graph. A forward that does anything else
with the keys and values of a cache, or with a mask, whose sizes differ from call to call, cannot be
recorded.

Shared states are the keys and values that one layer leaves for later ones in a dictionary. What a
forward reads there are inputs of the graph, and what it leaves there are results.
"""

from __future__ import annotations

import functools
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..library_internals import (
    GET_ATTENTION,
    attention_interface,
    is_kv_cache,
    is_shared_states,
)
from .cached_attention import (
    CACHE_UPDATE,
    CACHED_ATTENTION,
    CALLS,
    LAYER_INDEX,
    AttentionCall,
    CacheUpdate,
    Run,
    plainly,
    running_calls,
)
from .recorded_ops import sdp_backends
from .watched_forward import PLAIN, CannotRecord

# of an argument: 0 and its number in args, or 1 and its name in kwargs
Place = tuple[int, Any]
OWN = "an attention function of your own"
OUTSIDE = "it computes with the keys and values of its cache outside of attention"
# what a forward may ask of tensors whose size differs from call to call
ASKED = frozenset(("dtype", "device", "ndim", "dim", "requires_grad", "is_cuda", "layout"))


class _Recording(threading.local):
    """The calls of the forward that is recorded in this thread."""

    calls: CachedCalls | None = None


_recording = _Recording()


def changes_size(name: str, value: Any) -> bool:
    """Whether an argument grows with a cache: masks do, and keys and values that layers share."""
    return "mask" in name or is_shared_states(value)


@dataclass(eq=False)
class CachedCalls:
    """The calls of one forward that is recorded with caches among its inputs."""

    root: nn.Module  # the block itself
    twin: nn.Module  # what is recorded in its place
    backends: Sequence[int]  # of attention, outside of the forward
    # with something else in the place of each cache, and a dictionary in that of shared states
    inputs: tuple[Any, Any] = ((), ())
    has_cache: bool = False
    shared: list[Place] = field(default_factory=list)  # where the shared states are
    written: list[dict[Any, Any]] = field(default_factory=list)  # what the forward leaves there
    made: list[CacheUpdate | AttentionCall] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    # tensors whose size depends on how many tokens a cache holds
    sized: list[Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)  # what the forward returns

    @staticmethod
    def of(
        root: nn.Module, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CachedCalls | None:
        """None if there is nothing of this kind among these inputs of a block."""
        values = (*args, *kwargs.values())
        has_cache = any(map(is_kv_cache, values))
        if not has_cache and not any(map(is_shared_states, values)):
            return None
        calls = CachedCalls(root, twin, sdp_backends(), has_cache=has_cache)

        def instead(value: Any, place: Place) -> Any:
            if is_shared_states(value):
                calls.shared.append(place)
                return dict(value)
            if is_kv_cache(value):
                return _StandIn(value, tuple(map(itemgetter, place)), calls)
            return value

        calls.inputs = (
            tuple(instead(v, (0, i)) for i, v in enumerate(args)),
            {n: instead(v, (1, n)) for n, v in kwargs.items()},
        )
        return calls

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of the forward, with these tensors in them."""
        given, self.written = (list(args), dict(kwargs)), []
        grown = [v for n, v in kwargs.items() if changes_size(n, v)]
        for root, key in self.shared:
            grown.append(given[root][key])
            self.written.append({})
            given[root][key] = _SharedStandIn(grown[-1], self.written[-1])
        if self.has_cache:
            self.sized += [t for t in _leaves(grown) if isinstance(t, Tensor)]
        return tuple(given[0]), given[1]

    def add(self, call: CacheUpdate | AttentionCall, run: Run) -> int:
        self.made.append(call)
        self.runs.append(run)
        return len(self.made) - 1

    def why_not(self, graph: fx.Graph) -> str | None:
        """Why a graph does not say what the forward does, or None."""
        updates = sum(isinstance(call, CacheUpdate) for call in self.made)
        if updates != len(graph.find_nodes(op="call_function", target=CACHE_UPDATE)):
            return "it makes no use of what a cache returns"
        if any(map(self._is_sized, self.results)):
            return "it returns what is as long as its cache"
        if any(map(_depends_on_values, graph.nodes)):
            # another shape is noticed after the cache was written to, too late for the own forward
            return "it has a cache, and a result whose shape depends on values"
        return None

    def _is_sized(self, value: Any) -> bool:
        return any(value is t for t in self.sized)

    def name_of(self, module: nn.Module) -> str:
        return next(name for name, m in self.twin.named_modules() if m is module)

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function of PyTorch that is given a tensor whose size depends on a cache:
        attention, of which a call is one op. NotImplemented if it is not given any."""
        if function in CALLS:
            return NotImplemented
        if not any(map(self._is_sized, _leaves((args, kwargs)))):
            return NotImplemented
        if function is Tensor.to and not kwargs and args[1:] == (args[0].device,):
            return args[0]
        if function is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name not in ASKED:
            raise CannotRecord(OUTSIDE)
        return NotImplemented

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        kwargs |= {"dropout_p": dropout_p, "is_causal": is_causal}
        return self.attend(_sdpa_of, self.twin, query, key, value, attn_mask, kwargs)[0]

    def attend(
        self,
        function: Callable[[Any], Callable[..., Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """A call of an attention function, as one op."""
        if kwargs.get("dropout") or kwargs.get("dropout_p"):
            raise CannotRecord("attention with dropout")
        if sdp_backends() != self.backends:
            raise CannotRecord("it chooses the kernel of attention itself")
        if self._is_sized(query):
            raise CannotRecord(OUTSIDE)
        name = self.name_of(module)
        # not the twin, whose weights are stand-ins: a function may read some
        owner = self.root.get_submodule(name)
        recorded = function(owner)
        if not _is_of_a_library(recorded):  # it may draw, count or return what it likes
            raise CannotRecord(OWN)
        tensors = tuple(n for n, v in kwargs.items() if isinstance(v, Tensor))
        plain = {n: v for n, v in kwargs.items() if n not in tensors}
        if not all(map(_is_constant, plain.values())):
            raise CannotRecord("it gives attention more than tensors and numbers")
        masks = () if mask is None else (mask,)
        call = AttentionCall((name,), function, recorded, bool(masks), plain, tensors)
        number = self.add(call, functools.partial(call, owner, plainly))
        given = [query, key, value, *masks, *(kwargs[n] for n in tensors)]
        rows, *weights = CACHED_ATTENTION(given, number)
        self.sized += weights
        return rows, (weights[0] if weights else None)


def _sdpa_of(module: nn.Module) -> Callable[..., Any]:
    return _sdpa


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value, mask, **kwargs), None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def _is_constant(value: Any) -> bool:
    return isinstance(value, PLAIN) and not isinstance(value, Tensor)


def _depends_on_values(node: fx.Node) -> bool:
    """Whether the shape of a result depends on values. That of an index by numbers does not,
    although the op says so."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    return any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in node.all_input_nodes[1:])


def _is_of_a_library(function: Any) -> bool:
    """Whether this is a function of PyTorch's, of transformers' or ours."""
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "transformers", __name__.partition(".")[0])


class _StandIn:
    """In the place of a cache while a forward is recorded."""

    __slots__ = ("_own",)

    def __init__(self, cache: Any, path: Any, calls: CachedCalls) -> None:
        object.__setattr__(self, "_own", (cache, path, calls))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._own[0])

    def __getattr__(self, name: str) -> Any:
        raise CannotRecord(f"it reads {name} of its cache")

    def __setattr__(self, name: str, value: Any) -> None:
        raise CannotRecord(f"it sets {name} of its cache")

    def __delattr__(self, name: str) -> None:
        raise CannotRecord(f"it deletes {name} of its cache")

    def __len__(self) -> int:
        raise CannotRecord("it asks how many layers its cache has")

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        cache, path, calls = self._own
        if not all(map(_is_constant, _leaves((args, kwargs)))):
            raise CannotRecord("it gives its cache more than keys and values")
        modules = dict(calls.root.named_modules())
        owners = tuple(n for n, m in modules.items() if vars(m).get(LAYER_INDEX) == layer_idx)
        if not owners:
            raise CannotRecord(f"no module of it has the {LAYER_INDEX} that it gives its cache")
        call = CacheUpdate(path, owners, args, kwargs)
        number = calls.add(call, functools.partial(call, cache, modules[owners[0]]))
        made = CACHE_UPDATE([key, value], number)
        calls.sized += made
        return tuple(made)


class UntouchedStates:
    """In the place of shared states where a forward must not use them."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return UserDict

    def _refused(self, *args: Any) -> Any:
        raise CannotRecord("it reads or writes what layers share")

    __getattr__ = __setattr__ = __delattr__ = _refused
    __contains__ = __getitem__ = __setitem__ = __delitem__ = _refused
    __iter__ = __len__ = __or__ = __ior__ = _refused


UNTOUCHED = UntouchedStates()


class _SharedStandIn(UntouchedStates):
    """In the place of shared states while a forward is recorded, which may read and write items."""

    __slots__ = ("_held", "_written")
    _held: dict[Any, Any]
    _written: dict[Any, Any]

    def __init__(self, held: dict[Any, Any], written: dict[Any, Any]) -> None:
        object.__setattr__(self, "_held", held)
        object.__setattr__(self, "_written", written)

    def __contains__(self, key: Any) -> bool:
        return key in self._written or key in self._held

    def __getitem__(self, key: Any) -> Any:
        return self._written[key] if key in self._written else self._held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, int | str) or not is_shared_states(UserDict({key: value})):
            raise CannotRecord("it shares more than tensors with other layers")
        self._written[key] = value


_one_at_a_time = threading.RLock()


@contextmanager
def recorded_calls_of_caches(calls: CachedCalls | None) -> Iterator[None]:
    """Collect what this thread calls of caches, and the attention functions that it asks
    transformers for: each call is one op."""
    if calls is None:
        yield
        return
    interface, before = attention_interface(), _recording.calls
    with _one_at_a_time, running_calls(calls.runs):  # the method is replaced for all threads
        own = getattr(interface, GET_ATTENTION, None)
        if own is not None:
            setattr(interface, GET_ATTENTION, _as_op(own))
        _recording.calls = calls
        try:
            yield
        finally:
            _recording.calls = before
            if own is not None:
                setattr(interface, GET_ATTENTION, own)


def _as_op(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get(self: Any, implementation: str, default: Any) -> Any:
        calls = _recording.calls
        if calls is None:  # another thread
            return own(self, implementation, default)

        def function(module: Any) -> Callable[..., Any]:
            return own(self, module.config._attn_implementation, default)

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            if module.config._attn_implementation != implementation:
                raise CannotRecord("it chooses its attention function itself")
            return calls.attend(function, module, query, key, value, mask, kwargs)

        return attend

    return get
