"""Modules run as programs of the fuser, recorded once for each structure and layout of inputs.

A recording has weights as inputs, so it serves every module that does the same with its own. What a
forward reads from Python is part of the module's state: a verdict on a module holds for one state,
and what is bound here belongs to that verdict (`mode.cache_scope`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...backends import Unsupported
from ...backends.torch_internals import pytree
from ...fuser import interpreter, planning, recording
from ...fuser.expression import Load, walk
from ...fuser.index import CannotIndex
from ...fuser.launching import Kernels, Launched
from ...fuser.planning import Plan
from ...fuser.program import Program
from ...fuser.readable import short_counts
from ...fuser.recording import CannotRecord, Recording, opaque_layers
from ...fuser.running import Executable, OtherShape
from ...library_internals import peft_layers
from ...ops.linear import algorithms
from ..identify.structure import layout, structure_of
from ..runtime.forwards import hooked
from ..runtime.input_key import has_state
from ..runtime.sites import declined, eagerly, mode, site
from ..state.hooks import effect_of, effect_of_class
from .prompt_values import PerForwardCache

# kernels for each op from which on a recording is not used: PyTorch's own are as fast
WORTH = 0.75
# recordings of one injection: a service that keeps getting new shapes must not grow without bound
MAX_RECORDINGS = 512


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a recording depends on: how inputs lie in memory, and the value of all others."""
    return tuple(map(_key_of, args)), tuple([(k, _key_of(v)) for k, v in kwargs.items()])


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        start = 0 if value.is_meta else value.data_ptr() & 15
        return type(value), value.shape, value.stride(), value.dtype, value.device, start
    if isinstance(value, tuple | list):
        return type(value), tuple([_key_of(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _key_of(v)) for k, v in value.items()])
    if isinstance(value, float):
        return float, repr(value)  # 0.0 == -0.0, but they may give other results
    if value is None or isinstance(value, bool | int | str):
        return type(value), value
    return type(value)


@dataclass(frozen=True)
class BlockLine:
    """What became of the blocks of one class: how many ops are in how many kernels, which are left
    to PyTorch and how often, and why some have no kernel."""

    kind: str
    ops: int
    kernels: int
    left: dict[str, int]
    why: tuple[str, ...]

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.kind}: runs as it did: {'; '.join(self.why)}"
        left = ", ".join(f"{n} {op}" for op, n in self.left.items())
        why = f" ({'; '.join(self.why)})" if self.why else ""
        return f"{self.kind}: {self.ops} ops in {self.kernels} kernels; PyTorch's: {left}{why}"


@dataclass(eq=False)
class Recorded:
    """A forward as programs, for all modules of one structure."""

    kind: str
    recording: Recording
    executable: Executable
    kernels: int
    plan: Plan
    shared: PerForwardCache = field(default_factory=PerForwardCache)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The result of a forward; what the blocks of a model share is made by the first of them.
        A comparison makes everything anew."""
        early, places = None, self.executable.early_inputs
        if places and mode.notes is None and not mode.off:
            first, *others = [inputs[place] for place in places]
            early = self.shared(first, None, lambda: self.executable.early(inputs), others)
        return self.recording.result(self.executable(inputs, early))

    def described(self) -> BlockLine:
        left = short_counts(self.plan.left)
        return BlockLine(self.kind, self.plan.ops, self.kernels, left, tuple(self.plan.refused))


@dataclass(eq=False)
class Bound:
    """A recording with the places of one module's weights."""

    recorded: Recorded
    places: list[tuple[dict[str, Any], str]]
    layouts: list[Any]
    opaque: tuple[nn.Module, ...]
    layers: dict[str, nn.Module]  # the layer of each weight that is a matrix

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or a `str`: why the module's own has to run this time."""
        weights = [holder[name] for holder, name in self.places]
        if list(map(layout, weights)) != self.layouts:
            return "weights of another layout than when they were recorded"
        inputs = [*weights, *self.recorded.recording.given(args, kwargs)]
        before, _running.layers = _running.layers, self.layers
        try:
            if not self.opaque:
                return self.recorded.run(inputs)
            with opaque_layers(self.opaque):
                return self.recorded.run(inputs)
        except OtherShape:
            return "a result whose shape depends on values has another one"
        finally:
            _running.layers = before


class _Running(threading.local):
    """The module whose programs run in this thread."""

    layers: Mapping[str, nn.Module] = {}


_running = _Running()


@dataclass(eq=False)
class Programs:
    """The recordings of one injection."""

    exact: bool = True
    fp8_layers: Any = None
    # calls of blocks of a class, or of a program, that ran otherwise than compared, and why
    fell_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    _shared: dict[Any, Recorded | str] = field(default_factory=dict)
    _last: dict[str, Recorded | str] = field(default_factory=dict)  # by class
    _bound: WeakKeyDictionary[nn.Module, dict[Any, Bound | str]] = field(
        default_factory=WeakKeyDictionary
    )

    def described(self) -> list[BlockLine]:
        """What became of each class of blocks, as last recorded."""
        return [
            BlockLine(kind, 0, 0, {}, (found,)) if isinstance(found, str) else found.described()
            for kind, found in self._last.items()
        ]

    def recorded(self, module: nn.Module, args: Any, kwargs: Any) -> Recorded | str:
        """The forward of a module as programs, or why it cannot be."""
        return self._recorded(module, args, kwargs, ())[0]

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or NotImplemented if the module's own has to run."""
        if torch.is_grad_enabled():
            return self._declined("autograd records it")
        known = self._bound.setdefault(module, {})
        key = mode.cache_scope, signature(args, kwargs)
        found = known.get(key)
        if found is None:
            found, result = self._bind(module, key[1], args, kwargs)
            if len(known) >= MAX_RECORDINGS:
                known.clear()
            known[key] = found
            if result is not None:
                if mode.uninformative is not None:
                    mode.uninformative.add("forward as programs")  # to be compared next time
                return result
        if isinstance(found, str):
            return self._declined(found)
        result = found(args, kwargs)
        if isinstance(result, str):
            self.fell_back[found.recorded.kind, result] += 1
            return self._declined(result)
        return result

    @staticmethod
    def _declined(why: str) -> Any:
        declined("forward as programs", why)
        return NotImplemented

    def _bind(
        self, module: nn.Module, signed: Any, args: Any, kwargs: Any
    ) -> tuple[Bound | str, Any]:
        """A recording for this module. Layers with hooks must not run twice: if it has opaque ones,
        the run that was recorded is this call, and its result is returned as well, even if the
        recording is of no use."""
        opaque = opaque_in(module)
        why = why_not(module, opaque)
        if why is None and has_state(args, kwargs):
            why = "an input that it may write to"
        if why is not None:
            self._last.setdefault(type(module).__name__, why)
            return why, None
        key = structure_of(module, opaque), signed, torch.is_inference_mode_enabled()
        result = None
        if (found := self._shared.get(key)) is None:
            found, result = self._recorded(module, args, kwargs, opaque)
            private = isinstance(found, Recorded) and found.recording.constants
            if not private:
                if len(self._shared) >= MAX_RECORDINGS:
                    self._shared.clear()
                self._shared[key] = found
        self._last[type(module).__name__] = found
        if isinstance(found, str):
            return found, result if opaque else None
        places = _places(module, found.recording.weights)
        layouts = [layout(holder[name]) for holder, name in places]
        layers = _layers(module, found.recording)
        return Bound(found, places, layouts, opaque, layers), result if opaque else None

    def _recorded(
        self, module: nn.Module, args: Any, kwargs: Any, opaque: tuple[nn.Module, ...]
    ) -> tuple[Recorded | str, Any]:
        try:
            with eagerly():
                if any(map(_remembers, opaque)):
                    recording.rehearse(module, args, kwargs, opaque)
                made = recording.record(module, args, kwargs, opaque)
        except CannotRecord as no:
            return str(no), None
        result, made.results = made.result(made.results), []
        if why := _unknown_constant(module, made):
            return why, result
        device = next((t.device for t in made.given(args, kwargs) if t.is_cuda), None)
        kernels = Kernels(self.exact)
        try:
            plan = planning.plan(made, None if device is None else kernels.why_not)
        except CannotIndex as no:
            return str(no), result
        programs = [step for step in plan.steps if isinstance(step, Program)]
        if why := little_to_gain(plan.ops, len(programs)):
            return why, result
        launched = {} if device is None else kernels.launched(programs, plan.values, device)
        runner = _Runner(type(module).__name__, programs, launched, self.fell_back)
        executable = Executable(plan, runner, None if device is None else self._product)
        kind = type(module).__name__
        return Recorded(kind, made, executable, len(programs), plan), result

    def _product(self, weight: str) -> Callable[..., Tensor]:
        """A linear layer: in fp8 if its layer is, else by the fastest algorithm."""
        if self.fp8_layers is None:
            return algorithms.linear

        def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            layer = _running.layers.get(weight)
            y = None if layer is None else self.fp8_layers(layer, x)
            return algorithms.linear(x, w, bias) if y is None else y

        return product


def little_to_gain(ops: int, kernels: int) -> str | None:
    """Why a recording is not worth using, or None if it is."""
    few = kernels > WORTH * ops
    return f"little to gain: {ops} ops would be {kernels} kernels" if few else None


def _layers(root: nn.Module, made: Recording) -> dict[str, nn.Module]:
    """The linear layers of a module by the names that their weights have in its graph."""
    inputs = [n.name for n in made.graph.find_nodes(op="placeholder")]
    found: dict[str, nn.Module] = {}
    for node, name in zip(inputs, made.weights, strict=False):
        path, _, last = name.rpartition(".")
        layer = root.get_submodule(path)
        if last == "weight" and type(layer) is nn.Linear:
            found[node] = layer
    return found


class _Runner:
    """Runs the programs of one recording, each as a site of its own."""

    def __init__(
        self,
        kind: str,
        programs: Sequence[Program],
        launched: Mapping[int, Launched],
        fell_back: Counter[tuple[str, str]],
    ) -> None:
        self.names = {id(p): f"program {i + 1} of {kind}" for i, p in enumerate(programs)}
        self.launched, self.fell_back = launched, fell_back

    def __call__(self, program: Program, given: Any, outputs: Any) -> None:
        if mode.notes is None and not mode.off:
            return self._kernel(program, given, outputs)
        site(
            self.names[id(program)],
            partial(self._eager, program, given, outputs),
            partial(self._result, program, given, outputs),
            *(given[source] for source in _summed(program)),
        )
        return None

    def _result(self, program: Program, given: Any, outputs: Any) -> list[Tensor]:
        try:
            self._kernel(program, given, outputs)
        except Unsupported as no:
            raise ValueError(str(no)) from no
        return list(outputs.values())

    def _kernel(self, program: Program, given: Any, outputs: Any) -> None:
        if not self.launched:
            return interpreter.run(program, given, outputs)
        try:
            return self.launched[id(program)]({**given, **outputs})
        except Unsupported as no:
            if mode.notes is not None:
                raise
            # a weight that was moved to an address that no vector begins at
            self.fell_back[self.names[id(program)], str(no)] += 1
            return interpreter.run(program, given, outputs)

    @staticmethod
    def _eager(program: Program, given: Any, outputs: Any) -> list[Tensor]:
        """The program with PyTorch's ops. A comparison calls it beside the kernel, and then what it
        returns is compared; otherwise what it writes is the result."""
        into = outputs if not mode.eager else {n: t.clone() for n, t in outputs.items()}
        interpreter.run(program, given, into)
        return list(into.values())


def _summed(program: Program) -> set[str]:
    """What a program sums along rows: zeros there would prove nothing about the order. Other steps
    are single ops whose bits do not depend on their neighbours."""
    found = walk(*(row.x for row in program.rows))
    return {e.source for e in found if isinstance(e, Load)}


def opaque_in(root: nn.Module) -> tuple[nn.Module, ...]:
    """Layers that are called, not read: adapters, and linear layers with a hook or a forward of
    others."""
    found: dict[int, nn.Module] = {id(m): m for m in peft_layers(root.modules()) if m is not root}
    inside = {id(i) for m in found.values() for i in m.modules()}
    for module in root.modules():
        if module is root or id(module) in inside or not isinstance(module, nn.Linear):
            continue
        if hooked(module) or effect_of(module) is not None:
            found[id(module)] = module
    return tuple(found.values())


def _remembers(layer: nn.Module) -> bool:
    """Whether a layer may do more than return a result."""
    return any(hooked(m) or effect_of(m) is not None for m in layer.modules())


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


def _unknown_constant(root: nn.Module, made: Recording) -> str | None:
    """Why a tensor that the forward reads may change unnoticed, or None."""
    aten = torch.ops.aten
    nodes = {n.name: n for n in made.graph.nodes}
    held = {id(t) for m in root.modules() for v in vars(m).values() for t in _tensors(v)}
    for name, tensor in made.constants.items():
        # a number written in the forward becomes a tensor that nothing else holds
        fresh = all(u.target is aten.lift_fresh_copy.default for u in nodes[name].users)
        if not fresh and id(tensor) not in held:
            return "a tensor that is neither given nor an attribute"
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _places(root: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        holder = module._parameters if last in module._parameters else module._buffers
        found.append((holder, last))
    return found
