"""The forwards that injected modules and models are given in place of their own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .fusions import Fusions
from .graphs.capture import capturing
from .recipes._recipe import Chain, Forward, Patch
from .runtime import forwards, model_run, work_ahead
from .runtime.input_key import signature
from .runtime.sites import current
from .state.tensor_samples import unchanged
from .verify.first_sight import Checker, looked_through

if TYPE_CHECKING:
    from .graphs.graphs import Graphs


def module_forward(
    patch: Patch, kind: type[nn.Module], fusions: Fusions, checker: Checker
) -> Forward:
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


def model_forward(
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
            needed = model_run.looks_back() or fusions.fp8_layers is not None
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
