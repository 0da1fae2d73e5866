"""Which modules of a model get which forward, and what the report says about each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from ..fuser.block_calls import blocks
from ..library_internals import keep_from_compiling
from .fp8.fetching import fetch_before_fusing
from .fp8.layers import DOES, Fp8Layers
from .fp8.resting import KEEP, Resting
from .fp8.suitable_layers import check_device, unfit
from .fusions import Fusions
from .graphs import generation
from .identify import norm_kinds
from .identify.filters import Selection
from .identify.targets import Part
from .new_forwards import model_forward, module_forward
from .recipes._any_block import BLOCK
from .recipes._recipe import Chain, Forward, Patch, full_name, recipes
from .report.record import Line
from .report.report import Report
from .runtime import forwards, work_ahead
from .state.tensor_samples import TensorSamples
from .training import causal_lm_loss
from .training.blocks import Training
from .verify.first_sight import Checker

if TYPE_CHECKING:
    from .graphs.graphs import Graphs

NUMERICS = ("exact", "fused", "fp8")
BACKENDS = ("auto", "torch", "triton", "cuda")


@dataclass(frozen=True)
class Options:
    """The arguments of `inject`, which explains them."""

    numerics: str = "exact"
    graphs: bool = False
    only: Any = None
    skip: Any = None
    verify: bool = False
    backend: str = "auto"
    recipes: bool = True
    keep: str | None = "cpu"

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise ValueError(f"inject: keep is {self.keep!r}, expected one of {KEEP}")
        if self.numerics not in NUMERICS:
            raise ValueError(f"inject: numerics is {self.numerics!r}, expected one of {NUMERICS}")
        if self.backend not in BACKENDS:
            raise ValueError(f"inject: backend is {self.backend!r}, expected one of {BACKENDS}")
        if self.numerics == "exact" and self.backend == "triton":
            raise ValueError(
                'inject: backend is "triton", which cannot fix the order of a sum; "exact" needs '
                '"cuda" or "auto", or choose numerics="fused"'
            )


@dataclass(eq=False)
class Injection:
    """One model with the forwards that replace those of its modules."""

    root: ref[nn.Module]
    checker: Checker
    forwards: list[tuple[ref[nn.Module], Forward]] = field(default_factory=list)
    has_graphs: bool = False
    has_loss: bool = False  # whether the loss of a language model is part of it
    fp8_layers: Fp8Layers | None = None

    def install(self) -> None:
        for module, forward in self.forwards:
            if (found := module()) is not None:
                forwards.install(found, forward)
        if (model := self.root()) is None:
            return
        if self.has_loss:
            causal_lm_loss.install(model, self.checker)
        if self.has_graphs:
            keep_from_compiling(model)
            generation.defer_stop_checks(model)
        if self.fp8_layers is not None and self.fp8_layers.resting.keep != "gpu":
            fetch_before_fusing(model)

    def add(self, module: nn.Module, forward: Forward) -> None:
        self.forwards.append((ref(module), forward))

    def forward_of(self, module: nn.Module) -> Forward | None:
        return next((forward for found, forward in self.forwards if found() is module), None)


def plan(part: Part, selection: Selection, report: Report, options: Options) -> Injection:
    """Choose a forward for every module of one model, and add what becomes of each to the report.
    The model is not changed yet."""
    return _Plan(part, selection, report, options).make()


class _Plan:
    """The steps of planning one model."""

    def __init__(self, part: Part, selection: Selection, report: Report, options: Options) -> None:
        self.part, self.selection, self.report, self.options = part, selection, report, options
        self.named = dict(part.model.named_modules())
        self.checker = Checker(options.numerics, options.verify)
        samples = TensorSamples()
        quantises = options.numerics == "fp8" and part.denoises
        self.fp8_layers = None
        if quantises:
            self.fp8_layers = Fp8Layers(self.checker, samples, resting=Resting(options.keep))
            self.checker.fetch_weights = self.fp8_layers.fetch_all
        self.fusions = Fusions(
            options.numerics,
            None if options.backend == "auto" else options.backend,
            norm_kinds.survey(self.named.values()),
            samples=samples,
            fp8_layers=self.fp8_layers,
        )
        self.checker.changed = self.fusions.forget_norms
        self.injection = Injection(ref(part.model), self.checker, fp8_layers=self.fp8_layers)
        self.injection.has_loss = options.only is None
        self.training = Training(self.checker, self.fusions.programs.fell_back)
        self.checker.training = self.training
        self.lines: Counter[Line] = Counter()
        self.of_families: dict[type, list[Patch]] = {}
        # recording and compiling pay off where a block runs at every step, not once per picture
        self.blocks = set(blocks(part.model)) if part.denoises else set()
        self.training.kinds = tuple({type(b) for b in self.blocks} - self._with_skipped_parts())

    def make(self) -> Injection:
        self._replace_modules()
        if self.fp8_layers is not None:
            self._quantise(self.fp8_layers)
        self._replace_models(self._graphs())
        self.report.checkers.append(self.checker)
        self.report.programs.append(self.fusions.programs)
        self.report.models.append(ref(self.part.model))
        if self.fp8_layers is not None:
            self.report.resting.append(self.fp8_layers.resting)
        self.report.add(self.lines)
        return self.injection

    def _replace_modules(self) -> None:
        """Choose new forwards for modules that match a recipe; one class shares one forward."""
        made: dict[tuple[int, type, Any], Forward] = {}
        covered: dict[nn.Module, str] = {}
        inside: set[nn.Module] = set()  # parts of blocks that run as programs
        for name, module in self.named.items():
            found, patch, why = self._match(module)
            if not found:
                continue
            why = why or self._left_alone(name, module, patch)
            if why is not None or patch is None:
                if module not in inside:  # the programs of a block have all of its parts
                    self._note(name, module, None, why)
                continue
            programs_for = self._programs_for(name, module, patch)
            by_programs = patch is BLOCK or programs_for is _all_calls
            if by_programs:
                parts = [m for m in module.modules() if m is not module]
                inside.update(parts)
                covered |= dict.fromkeys(parts, type(module).__name__)
            for child in patch.covers:
                if (inner := getattr(module, child, None)) is not None:
                    covered[inner] = type(module).__name__
            key = id(patch), type(module), programs_for
            if key not in made:
                made[key] = module_forward(
                    patch, type(module), self.fusions, self.checker, programs_for
                )
            self.checker.names[module] = self.part.path(name)
            work_ahead.allow(module)
            self.injection.add(module, made[key])
            does = BLOCK.does if by_programs else patch.does
            self._note(name, module, f"in {covered[module]}" if module in covered else does)

    def _programs_for(
        self, name: str, module: nn.Module, patch: Patch
    ) -> Callable[[Any, Any], bool] | None:
        """Which calls of a module that has a recipe run as programs. Programs run a whole block, so
        none where the user wants a part of it left alone."""
        if self._skips_inside(name, module):
            return None
        leaves_parts = module in self.blocks and patch.leaves_parts(module)
        return _all_calls if leaves_parts else patch.programs_for

    def _match(self, module: nn.Module) -> tuple[bool, Patch | None, str | None]:
        """Whether the report lists a module, its patch, and why it has none."""
        why = None
        for patch in self._patches(module):
            answer = patch.matches(module)
            if answer is True:
                return True, patch, None
            if isinstance(answer, str):
                why = why or answer
        if why is None and _COMPUTES.search(type(module).__name__):
            why = "no recipe for it" if any(module.children()) else "nothing to fuse in it alone"
        return why is not None, None, why

    def _patches(self, module: nn.Module) -> Iterator[Patch]:
        """Those written for a family first, then programs for blocks, then those of any module."""
        kind = type(module)
        if kind not in self.of_families:
            families = recipes() if self.options.recipes else ()
            patches = (p for r in families if not r.generic for p in r.patches)
            self.of_families[kind] = [p for p in patches if p.may_match(kind)]
        yield from self.of_families[kind]
        if module in self.blocks:
            yield BLOCK
        yield from (p for r in recipes() if r.generic for p in r.patches)

    def _left_alone(self, name: str, module: nn.Module, patch: Patch | None) -> str | None:
        """Why a module that matches a recipe keeps its forward, or None."""
        if no := self.selection.leaves_out(self.part, name, module):
            return no
        if patch is BLOCK and self._skips_inside(name, module):
            return "skip names a part of it"
        if patch is not None and self.options.numerics == "exact" and patch.not_exact:
            return patch.not_exact
        return forwards.why_not(module)

    def _with_skipped_parts(self) -> set[type]:
        """Classes of blocks in which the user names a part that is to be left as it is."""
        named = self.named.items() if self.selection.skip else ()
        return {type(m) for name, m in named if m in self.blocks and self._skips_inside(name, m)}

    def _skips_inside(self, name: str, module: nn.Module) -> bool:
        """Whether the user names a part of a module that is to be left as it is."""
        if not self.selection.skip:
            return False
        parts = ((f"{name}.{inner}", m) for inner, m in module.named_modules() if inner)
        return any(self.selection.leaves_out(self.part, *part) for part in parts)

    def _quantise(self, layers: Fp8Layers) -> None:
        """Choose the fp8 forward for the linear layers of the blocks."""
        check_device(self.part.model)
        forward = layers.forward()
        # whoever asks for the device of a model looks at its first parameter
        first = next(self.part.model.parameters(), None)
        uses = Counter(id(p) for m in self.named.values() for p in m._parameters.values())
        for name, layer in self.named.items():
            if type(layer) is not nn.Linear:
                continue
            why = unfit(name, layer) or self._left_alone(name, layer, None)
            if why is None:
                layers.add(layer, self.part.path(name))
                if layer.weight is first or uses[id(layer.weight)] > 1:
                    layers.resting.staying[layer] = "others read its weight"
                self.injection.add(layer, forward)
            self._note(name, layer, None if why else DOES, why)

    def _graphs(self) -> Graphs | None:
        """The CUDA graphs of the model, if the user wants them and it is a part that has any."""
        part = self.part
        wanted = part.encodes and self.selection.leaves_out(part, "", part.model) is None
        if not self.options.graphs or not (part.denoises or wanted):
            return None
        from .graphs.graphs import Graphs
        from .training.graphs import TrainingGraphs

        graphs = Graphs(name=part.name)
        self.report.graphs.append(graphs)
        if part.denoises:
            graphs.of_blocks = self.training.graphs = TrainingGraphs(graphs.recorder, part.name)
        self.injection.has_graphs = True
        return graphs

    def _replace_models(self, graphs: Graphs | None) -> None:
        """Choose a model forward for the model, and for modules in it that run blocks in order. It
        handles the order of the blocks, the state of the model, and its graphs."""
        changed = bool(self.injection.forwards)
        replayed = self.part.graphed
        for module in self.named.values():
            chain = _chain(module) if changed else None
            graphed = graphs if module is replayed else None
            root = module is self.part.model and changed
            if (chain or graphed or root) and forwards.why_not(module) is None:
                inner = self.injection.forward_of(module)
                self.injection.add(
                    module,
                    model_forward(type(module), inner, chain, graphed, self.fusions, self.checker),
                )

    def _note(self, name: str, module: nn.Module, does: str | None, why: str | None = None) -> None:
        line = partial(
            Line, self.part.name, with_wildcards(name), full_name(type(module)), _weight(module)
        )
        self.lines[line(does, self.options.numerics, why)] += 1


def _all_calls(args: Any, kwargs: Any) -> bool:
    return True


def _chain(module: nn.Module) -> Chain | None:
    """A function that lists the blocks of a module in the order of their calls, or None."""
    return next((c for r in recipes() if (c := r.chain(module)) is not None), None)


# class names that a reader expects to find in the report
_COMPUTES = re.compile(r"Norm|Attention|GLU|FeedForward|MLP|Rotary|Rope|RoPE|PosEmbed")


def with_wildcards(name: str) -> str:
    """transformer_blocks.3.norm1 -> transformer_blocks.*.norm1"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _weight(module: nn.Module) -> bool | None:
    """Whether a leaf module has a weight; None if it has children."""
    if any(module.children()):
        return None
    return getattr(module, "weight", None) is not None
