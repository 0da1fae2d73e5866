"""Putting recipes on a model, and taking them off again.

Everything an injection leaves on a model is the instance attribute `forward` of the modules it
changes (or the slot in which a hook keeps it). Restoring removes it; copying a model copies it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from .fp8.layers import DOES, EightBits, check_device, unfit
from .fusions import Fusions
from .graphs.capture import capturing
from .identify import norm_kinds
from .identify.filters import Selection
from .identify.targets import Part, parts_of
from .recipes._recipe import Chain, Forward, Patch, full_name, recipes
from .report.record import Line
from .report.report import Report
from .runtime import forwards, model_run, work_ahead
from .runtime.input_key import signature
from .runtime.sites import current
from .state.tensor_samples import Contents, unchanged
from .verify.first_sight import Checker, looked_through

if TYPE_CHECKING:
    from .graphs.graphs import Graphs

NUMERICS = ("exact", "fused", "fp8")


@dataclass(eq=False)
class Injection:
    """One model with the forwards that replace those of its modules."""

    root: ref[nn.Module]
    checker: Checker
    forwards: list[tuple[ref[nn.Module], Forward]] = field(default_factory=list)

    def put(self) -> None:
        for module, forward in self.forwards:
            if (found := module()) is not None:
                forwards.put(found, forward)


_active: WeakKeyDictionary[nn.Module, list[Injection]] = WeakKeyDictionary()


def inject(
    target: Any,
    *,
    numerics: str = "exact",
    graphs: bool = False,
    only: Any = None,
    skip: Any = None,
    verify: bool = False,
    backend: str = "auto",
) -> Report:
    """Make a model use the kernels, until `restore(target)`.

    Args:
        target: a diffusers pipeline, a model of diffusers or transformers, or any nn.Module.
        numerics: "exact" gives the bits of eager PyTorch: every module is compared with its own
            forward the first time it sees a shape, and stays eager if it differs. "fused" rounds
            once where eager rounds after every step; its error is not above eager's.
        graphs: replay the forward of the denoiser and of text encoders, or of the model given, as
            CUDA graphs.
        only, skip: names of components ("vae"), of classes ("LTXAttention") or of modules
            ("transformer_blocks.0.*"), one or several.
        verify: in "fused", check every module at every new shape, not one of each class once.
        backend: "auto", or the name of the one that every op shall use.

    Returns:
        A report of what was replaced, by what, and what was left alone and why. Print it.
    """
    report, injections = _prepare(target, numerics, graphs, only, skip, verify, backend)
    for injection in injections:
        root = injection.root()
        assert root is not None
        for before in _active.get(root, ()):
            before.checker.retired = True
        _take_off(root)
        _active[root] = [injection]
        injection.put()
    return report


def restore(target: Any) -> int:
    """Bring back exactly what was there before `inject`; returns how many modules changed."""
    count = 0
    for part in parts_of(target):
        for injection in _active.pop(part.model, ()):
            injection.checker.retired = True
        count += _take_off(part.model)
    return count


@contextmanager
def injected(target: Any, **how: Any) -> Iterator[Report]:
    """`inject` for as long as a `with` lasts; what was injected before comes back after it."""
    report, injections = _prepare(target, **{**_DEFAULTS, **how})
    for injection in injections:
        root = injection.root()
        assert root is not None
        _active.setdefault(root, []).append(injection)
        _show_last(root)
    try:
        yield report
    finally:
        for injection in injections:
            root = injection.root()
            if root is not None and injection in _active.get(root, ()):
                _active[root].remove(injection)
                injection.checker.retired = True
                _show_last(root)


def inspect(target: Any, *, numerics: str = "exact", only: Any = None, skip: Any = None) -> Report:
    """What `inject` would do, without doing it. Works on a model without memory ("meta") too."""
    report, _ = _prepare(target, **{**_DEFAULTS, "numerics": numerics, "only": only, "skip": skip})
    return report.as_plan()


_DEFAULTS = {
    "numerics": "exact",
    "graphs": False,
    "only": None,
    "skip": None,
    "verify": False,
    "backend": "auto",
}


def _take_off(root: nn.Module) -> int:
    return sum(forwards.remove(module) for module in root.modules())


def _show_last(root: nn.Module) -> None:
    _take_off(root)
    if stack := _active.get(root):
        stack[-1].put()
    else:
        _active.pop(root, None)


def _prepare(
    target: Any, numerics: str, graphs: bool, only: Any, skip: Any, verify: bool, backend: str
) -> tuple[Report, list[Injection]]:
    _check_arguments(numerics, backend)
    parts = parts_of(target)
    selection = Selection(only, skip, parts)
    report = Report(type(target).__name__, numerics)
    injections = [
        _plan(part, selection, report, numerics, graphs, verify, backend) for part in parts
    ]
    return report, injections


def _check_arguments(numerics: str, backend: str) -> None:
    if numerics not in NUMERICS:
        raise ValueError(f"inject: numerics is {numerics!r}, expected one of {NUMERICS}")
    known = ("auto", "torch", "triton", "cuda")
    if backend not in known:
        raise ValueError(f"inject: backend is {backend!r}, expected one of {known}")
    if numerics == "exact" and backend == "triton":
        raise ValueError(
            'inject: backend is "triton", which cannot fix the order of a sum; "exact" needs '
            '"cuda" or "auto", or choose numerics="fused"'
        )


def _plan(
    part: Part,
    selection: Selection,
    report: Report,
    numerics: str,
    graphs: bool,
    verify: bool,
    backend: str,
) -> Injection:
    """Find a forward for every module of one model, and write down what becomes of each."""
    model = part.model
    named = dict(model.named_modules())
    checker = Checker(numerics, verify)
    contents = Contents()
    quantises = numerics == "fp8" and part.denoises
    eight_bits = EightBits(checker, contents) if quantises else None
    fusions = Fusions(
        numerics,
        None if backend == "auto" else backend,
        norm_kinds.survey(named.values()),
        contents=contents,
        eight_bits=eight_bits,
    )
    checker.changed = fusions.look_again
    report.checkers.append(checker)
    report.models.append(ref(model))
    injection = Injection(ref(model), checker)
    made: dict[tuple[int, type], Forward] = {}
    covered: dict[nn.Module, str] = {}
    lines: Counter[Line] = Counter()
    for name, module in named.items():
        found, patch, why = _match(module)
        if not found:
            continue
        line = partial(Line, part.name, places(name), full_name(type(module)), _weight(module))
        if why is None and (no := selection.leaves_out(part, name, module)):
            why = no
        if why is None and patch is not None and numerics == "exact":
            why = patch.not_exact
        if why is None:
            why = forwards.why_not(module)
        if why is not None or patch is None:
            lines[line(None, numerics, why)] += 1
            continue
        for child in patch.covers:
            if (inner := getattr(module, child, None)) is not None:
                covered[inner] = type(module).__name__
        key = id(patch), type(module)
        if key not in made:
            made[key] = _forward(patch, type(module), fusions, checker)
        checker.names[module] = part.path(name)
        work_ahead.allow(module)
        injection.forwards.append((ref(module), made[key]))
        does = f"in {covered[module]}" if module in covered else patch.does
        lines[line(does, numerics, None)] += 1
    if eight_bits is not None:
        lines += _quantise(part, selection, injection, eight_bits, named)
    report.add(lines)
    wrap: Graphs | None = None
    if graphs and (part.denoises or _encodes(part, selection)):
        from .graphs.graphs import Graphs

        wrap = Graphs(name=part.name)
        report.graphs.append(wrap)
    replayed = part.graphed
    for module in named.values():
        chain = _chain(module) if injection.forwards else None
        graphed = wrap if module is replayed else None
        root = module is model and bool(injection.forwards)
        if (chain or graphed or root) and forwards.why_not(module) is None:
            inner = next((f for r, f in injection.forwards if r() is module), None)
            whole = _whole(type(module), inner, chain, graphed, fusions, checker)
            injection.forwards.append((ref(module), whole))
    return injection


def _encodes(part: Part, selection: Selection) -> bool:
    """Whether a part is an encoder that the person wants changed."""
    return part.encodes and selection.leaves_out(part, "", part.model) is None


def _quantise(
    part: Part,
    selection: Selection,
    injection: Injection,
    eight_bits: EightBits,
    named: dict[str, nn.Module],
) -> Counter[Line]:
    """Give the linear layers of the blocks to `eight_bits`."""
    check_device(part.model)
    lines: Counter[Line] = Counter()
    forward = eight_bits.forward()
    for name, layer in named.items():
        if type(layer) is not nn.Linear:
            continue
        why = (
            unfit(name, layer) or selection.leaves_out(part, name, layer) or forwards.why_not(layer)
        )
        if why is None:
            eight_bits.add(layer, part.path(name))
            injection.forwards.append((ref(layer), forward))
        line = Line(
            part.name, places(name), full_name(nn.Linear), True, None if why else DOES, "fp8", why
        )
        lines[line] += 1
    return lines


def _chain(module: nn.Module) -> Chain | None:
    """How to find the blocks of a module in the order in which it calls them."""
    return next((c for r in recipes() if (c := r.chain(module)) is not None), None)


def _match(module: nn.Module) -> tuple[bool, Patch | None, str | None]:
    """Whether a module is of interest, the patch for it, and why it gets none."""
    why = None
    for recipe in recipes():
        for patch in recipe.patches:
            answer = patch.matches(module)
            if answer is True:
                return True, patch, None
            if isinstance(answer, str):
                why = why or answer
    if why is None and _COMPUTES.search(type(module).__name__):
        why = "no recipe for it" if any(module.children()) else "nothing to fuse in it alone"
    return why is not None, None, why


# names of modules that a reader of the report expects to find in it
_COMPUTES = re.compile(r"Norm|Attention|GLU|FeedForward|MLP|Rotary|Rope|RoPE|PosEmbed")


def places(name: str) -> str:
    """transformer_blocks.3.norm1 -> transformer_blocks.*.norm1"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _weight(module: nn.Module) -> bool | None:
    """Whether a leaf has a weight of its own."""
    if any(module.children()):
        return None
    return getattr(module, "weight", None) is not None


def _forward(patch: Patch, kind: type[nn.Module], fusions: Fusions, checker: Checker) -> Forward:
    """The forward that all modules of one class share: torch.compile then traces it once."""
    recipe = patch.forward(fusions, kind) if patch.for_class else patch.forward(fusions)
    own = kind.forward
    known = patch.is_written_for(kind)

    def eager(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forwards.class_forward(self, own)(self, *args, **kwargs)

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = recipe(self, *args, **kwargs)
        return eager(self, *args, **kwargs) if result is NotImplemented else result

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return (fused if known else own)(self, *args, **kwargs)
        return checker.run(self, fused, eager, args, kwargs)

    fused.own, fused.known, fused.patch = own, known, patch  # type: ignore[attr-defined]
    forward.fused = fused  # type: ignore[attr-defined]
    setattr(forward, forwards.MARK, patch)
    return forward


def _whole(
    kind: type[nn.Module],
    inner: Forward | None,
    chain: Chain | None,
    graphs: Graphs | None,
    fusions: Fusions,
    checker: Checker,
) -> Forward:
    """The forward of a whole model: its own, or `inner` if a patch is for the model itself, told in
    which order the blocks run, or as a graph."""
    own = kind.forward
    runs_as = inner or own

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return runs_as(self, *args, **kwargs)
        eager = forwards.class_forward(self, own)
        if current.eager or checker.retired or eager is not own or looked_through():
            return eager(self, *args, **kwargs)
        if graphs is not None:
            return graphs(self, run, args, kwargs)
        return run(self, *args, **kwargs)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with model_run.begin(self, args, kwargs, fusions.contents):
            kept = fusions.contents
            first = model_run.is_first(self) and not capturing()
            # without fp8 weights, a model that cannot look back uses nothing that was kept
            needed = model_run.looks_back() or fusions.eight_bits is not None
            answer = kept.check() if first and kept and needed else unchanged
            now = not model_run.current.on_gpu or model_run.current.memory is not None
            if now and not answer():  # it must not be run twice, or is told at once
                kept.forget()
                answer = unchanged
            result = ordered(self, *args, **kwargs)
            if answer():  # asked here, the GPU has been at work since
                return result
            result = None
            kept.forget()
            return ordered(self, *args, **kwargs)

    def ordered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if chain is None:
            return runs_as(self, *args, **kwargs)
        with work_ahead.chain(chain(self), signature(args, kwargs)):
            return runs_as(self, *args, **kwargs)

    forward.fused = getattr(inner, "fused", None)  # type: ignore[attr-defined]
    setattr(forward, forwards.MARK, getattr(inner, forwards.MARK, None))
    return forward
