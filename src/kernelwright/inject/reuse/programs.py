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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...backends.torch_internals import layout_check
from ...fuser import planning, recording
from ...fuser.index import CannotIndex
from ...fuser.launching import Kernels
from ...fuser.planning import Plan
from ...fuser.program import Program
from ...fuser.readable import short_counts
from ...fuser.recording import CannotRecord, Recording, opaque_layers
from ...fuser.running import Executable, OtherShape
from ...ops.linear import algorithms
from ..identify.structure import layout, structure_of
from ..runtime.input_key import has_state
from ..runtime.sites import declined, eagerly, mode
from .program_sites import ProgramSites
from .prompt_values import PerForwardCache
from .recordable import little_to_gain, opaque_in, remembers, signature, unknown_constant, why_not

# recordings of one injection: a service that keeps getting new shapes must not grow without bound
MAX_RECORDINGS = 512


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
    same_layouts: Callable[..., bool]  # finds most that are the same, in less time
    opaque: tuple[nn.Module, ...]
    layers: dict[str, nn.Module]  # the layer of each weight that is a matrix

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or a `str`: why the module's own has to run this time."""
        weights = [holder[name] for holder, name in self.places]
        if not self.same_layouts(*weights) and list(map(layout, weights)) != self.layouts:
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
        known = self._bound.get(module)
        if known is None:
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
        weights = [holder[name] for holder, name in places]
        layouts, check = list(map(layout, weights)), layout_check(weights)
        layers = _layers(module, found.recording)
        return Bound(found, places, layouts, check, opaque, layers), result if opaque else None

    def _recorded(
        self, module: nn.Module, args: Any, kwargs: Any, opaque: tuple[nn.Module, ...]
    ) -> tuple[Recorded | str, Any]:
        try:
            with eagerly():
                if any(map(remembers, opaque)):
                    recording.rehearse(module, args, kwargs, opaque)
                made = recording.record(module, args, kwargs, opaque)
        except CannotRecord as no:
            return str(no), None
        result, made.results = made.result(made.results), []
        if why := unknown_constant(module, made):
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
        runner = ProgramSites(type(module).__name__, programs, launched, self.fell_back)
        products = None if device is None else self._product
        executable = Executable(plan, runner, products, runner.launcher)
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


def _places(root: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        holder = module._parameters if last in module._parameters else module._buffers
        found.append((holder, last))
    return found
