"""Modules run as programs of the fuser, recorded once for each structure and layout of inputs.

A recording has weights as inputs, so it serves every module that does the same with its own. What a
forward reads from Python is part of the module's state: a verdict on a module holds for one state,
and what is bound here belongs to that verdict (`mode.cache_scope`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...backends.torch_internals import layout_check, view_base
from ...fuser import attention_by_lengths, planning, recording
from ...fuser.attention_by_lengths import Lengths
from ...fuser.index import CannotIndex
from ...fuser.launching import Kernels
from ...fuser.planning import Plan
from ...fuser.program import Program
from ...fuser.readable import short_counts
from ...fuser.recording import CannotRecord, Recording, opaque_layers
from ...fuser.rewriting import (
    join_products_of_one_input,
    take_bias_out_of_convolutions,
    take_gelu_into_products,
)
from ...fuser.running import Executable, OtherShape
from ..identify.structure import layout, structure_of
from ..runtime.input_key import has_state
from ..runtime.sites import declined, eagerly, mode
from .kept_prompts import KeptPrompt
from .packed_gemm import SameBits
from .program_products import ProgramProducts, layers_of, running
from .program_sites import ProgramSites
from .prompt_values import PerForwardCache, Prompts
from .recordable import (
    little_to_gain,
    opaque_in,
    remembers,
    signature,
    unknown_constant,
    waits,
    why_not,
)

# recordings of one injection: a service that keeps getting new shapes must not grow without bound
MAX_RECORDINGS = 512


@dataclass(frozen=True)
class BlockLine:
    """What became of the blocks of one class: how many ops are in how many kernels, which are left
    to PyTorch and how often, why some have no kernel, and what masks say."""

    kind: str
    ops: int
    kernels: int
    left: dict[str, int]
    why: tuple[str, ...]
    masks: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.kind}: runs as it did: {'; '.join(self.why)}"
        left = ", ".join(f"{n} {op}" for op, n in self.left.items())
        why = f" ({'; '.join(self.why)})" if self.why else ""
        kernels = f"{self.ops} ops in {self.kernels} kernels"
        return "; ".join([f"{self.kind}: {kernels}", f"PyTorch's: {left}{why}", *self.masks])


@dataclass(eq=False)
class Recorded:
    """A forward as programs, for all modules of one structure."""

    kind: str
    recording: Recording
    executable: Executable
    kernels: int
    plan: Plan
    shared: PerForwardCache = field(default_factory=PerForwardCache)

    def run(self, inputs: Sequence[Tensor], prompts: Sequence[KeptPrompt] = ()) -> Any:
        """The result of a forward; what the blocks of a model share is made by the first of them,
        and what is made of a prompt is kept until another comes. A comparison makes everything
        anew."""
        early, kept, places = None, None, self.executable.early_inputs
        if mode.notes is None and not mode.off:
            if places:
                first, *others = [inputs[place] for place in places]
                early = self.shared(first, None, lambda: self.executable.early(inputs), others)
            if prompts:
                kept = [prompt(inputs) for prompt in prompts]
        return self.recording.result(self.executable(inputs, early, kept))

    def described(self) -> BlockLine:
        left, refused = short_counts(self.plan.left), tuple(self.plan.refused)
        said = [said for said in self.executable.lengths.values() if said is not None]
        masks = tuple(dict.fromkeys(map(attention_by_lengths.described, said)))
        return BlockLine(self.kind, self.plan.ops, self.kernels, left, refused, masks)


@dataclass(eq=False)
class Bound:
    """A recording with the places of one module's weights."""

    recorded: Recorded
    places: list[tuple[dict[str, Any], str]]
    layouts: list[Any]
    same_layouts: Callable[..., bool]  # finds most that are the same, in less time
    opaque: tuple[nn.Module, ...]
    layers: dict[str, nn.Module]  # the layer of each weight that is a matrix
    prompts: Sequence[KeptPrompt] = ()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or a `str`: why the module's own has to run this time."""
        weights = [holder[name] for holder, name in self.places]
        if not self.same_layouts(*weights) and list(map(layout, weights)) != self.layouts:
            return "weights of another layout than when they were recorded"
        inputs = [*weights, *self.recorded.recording.given(args, kwargs)]
        before, running.layers = running.layers, self.layers
        try:
            if not self.opaque:
                return self.recorded.run(inputs, self.prompts)
            with opaque_layers(self.opaque):
                return self.recorded.run(inputs, self.prompts)
        except OtherShape:
            return "a result whose shape depends on values has another one"
        finally:
            running.layers = before


@dataclass(eq=False)
class Programs:
    """The recordings of one injection."""

    exact: bool = True
    fp8_layers: Any = None
    prompts: Prompts | None = None
    same_bits: SameBits | None = None
    # calls of blocks of a class, or of a program, that ran otherwise than compared, and why
    fell_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    _masks: PerForwardCache = field(default_factory=PerForwardCache)
    _shared: dict[Any, Recorded | str] = field(default_factory=dict)
    _last: dict[str, Recorded | str] = field(default_factory=dict)  # by class
    _bound: WeakKeyDictionary[nn.Module, dict[Any, Bound | str]] = field(
        default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self._products = ProgramProducts(self.exact, self.fp8_layers, self.same_bits)

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
        """A recording for this module. Layers with hooks must not run twice, nor may attention that
        waits for other processes: if it has either, the run that was recorded is this call, and its
        result is returned as well, even if the recording is of no use."""
        opaque = opaque_in(module)
        once = bool(opaque) or waits(module)
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
            return found, result if once else None
        places = places_of(module, found.recording.weights)
        weights = [holder[name] for holder, name in places]
        layouts, check = list(map(layout, weights)), layout_check(weights)
        layers = layers_of(module, found.recording)
        prompts = self._prompts(module, found, layers)
        bound = Bound(found, places, layouts, check, opaque, layers, prompts)
        return bound, result if once else None

    def _prompts(
        self, module: nn.Module, found: Recorded, layers: dict[str, nn.Module]
    ) -> list[KeptPrompt]:
        if self.prompts is None:
            return []
        kept = []
        for steps in found.executable.prompts:
            names = [found.recording.weights[place] for place in steps.weights]
            own = [module.get_submodule(name.rpartition(".")[0]) for name in names]
            if self.fp8_layers is not None:
                for layer in own:
                    self.fp8_layers.leave(layer, "runs once per prompt")
            kept.append(KeptPrompt(steps, self.prompts, own[0], layers))
        return kept

    def _recorded(
        self, module: nn.Module, args: Any, kwargs: Any, opaque: tuple[nn.Module, ...]
    ) -> tuple[Recorded | str, Any]:
        try:
            with eagerly():
                if waits(module) or any(map(remembers, opaque)):
                    recording.rehearse(module, args, kwargs, opaque)
                made = recording.record(module, args, kwargs, opaque)
        except CannotRecord as no:
            return str(no), None
        result, made.results = made.result(made.results), []
        if why := unknown_constant(module, made):
            return why, result
        if not self.exact and self.fp8_layers is None:
            take_gelu_into_products(made.graph)
        take_bias_out_of_convolutions(made.graph)
        device = next((t.device for t in made.given(args, kwargs) if t.is_cuda), None)
        if device is not None:
            # on a CPU, PyTorch's functions of parts of a tensor have other bits than of a whole one
            inputs = made.inputs(module, args, kwargs)
            wanted = partial(self._products.join, module, made, inputs)
            join_products_of_one_input(made.graph, wanted)
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
        products = None if device is None else self._products.of
        lengths_of = None if self.exact else self._lengths_of
        executable = Executable(plan, runner, products, lengths_of, runner.launcher)
        kind = type(module).__name__
        return Recorded(kind, made, executable, len(programs), plan), result

    def _lengths_of(self, mask: Tensor, queries: int, keys: int) -> Lengths | str | None:
        """What a mask says about lengths: asked once per forward, since that waits for the GPU, and
        not at all where blocks must not share the answer."""
        if not PerForwardCache.is_allowed(mask):
            return None
        view = mask.shape, mask.stride(), mask.storage_offset(), queries, keys
        return self._masks(
            view_base(mask), view, lambda: attention_by_lengths.read(mask, queries, keys)
        )


def places_of(root: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Where a module holds the weights of these names."""
    found = []
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        holder = module._parameters if last in module._parameters else module._buffers
        found.append((holder, last))
    return found
