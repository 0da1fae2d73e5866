"""The forwards that replace those of modules and of whole models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..backends.torch_internals import needs_torch_ops
from ..calibration import background
from .fusions import Fusions
from .graphs.capture import capturing
from .graphs.host_reads import reading
from .recipes._recipe import Chain, Forward, Patch
from .reuse import recordable
from .runtime import forwards, model_run, work_ahead
from .runtime.input_key import number_of, signature
from .runtime.sites import mode
from .state.hooks import is_ours
from .state.tensor_samples import unchanged
from .verify.first_sight import Checker

if TYPE_CHECKING:
    from .graphs.graphs import Graphs


def module_forward(
    patch: Patch,
    kind: type[nn.Module],
    fusions: Fusions,
    checker: Checker,
    programs_for: Callable[[Any, Any], bool] | None = None,
) -> Forward:
    """The new forward of a class. Its modules share it, so torch.compile traces it once. Calls for
    which `programs_for` returns True run as programs of the fuser."""
    recipe = patch.forward(fusions, kind) if patch.for_class else patch.forward(fusions)
    own = kind.forward
    known = patch.is_written_for(kind)

    def eager(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forwards.class_forward(self, own)(self, *args, **kwargs)

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = recipe(self, *args, **kwargs)
        return eager(self, *args, **kwargs) if result is NotImplemented else result

    def by_programs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = fusions.programs.run(self, args, kwargs)
        if result is not NotImplemented:
            return result
        work_ahead.forget()  # its verdict does not say what was done ahead for it
        with work_ahead.alone():  # nor does that of the next one
            return fused(self, *args, **kwargs)

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # what is recorded when it runs is no part of a trace
            traced = fused if known and patch.signature is None else own
            return traced(self, *args, **kwargs)
        programs = programs_for is not None and programs_for(args, kwargs)
        return checker.run(self, by_programs if programs else fused, eager, args, kwargs)

    recorded = replace(patch, signature=recordable.signature)
    fused.own, fused.known, fused.patch = own, known, patch  # type: ignore[attr-defined]
    by_programs.own, by_programs.known, by_programs.patch = own, known, recorded  # type: ignore[attr-defined]
    forward.fused = fused  # type: ignore[attr-defined]
    return _marked(forward, patch)


def model_forward(
    kind: type[nn.Module],
    inner: Forward | None,
    chain: Chain | None,
    graphs: Graphs | None,
    fusions: Fusions,
    checker: Checker,
) -> Forward:
    """The new forward of a whole model: runs its own, or `inner` if the model itself is patched,
    with the order of its blocks known to them, and as a graph if `graphs` is given."""
    own = kind.forward
    runs_as = inner or own

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return runs_as(self, *args, **kwargs)
        eager = forwards.class_forward(self, own)
        if mode.eager or checker.retired or eager is not own or needs_torch_ops():
            return eager(self, *args, **kwargs)
        if graphs is not None:
            return graphs(self, run, args, kwargs)
        return run(self, *args, **kwargs)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with model_run.begin(self, args, kwargs, fusions.samples, fusions.states):
            samples = fusions.samples
            if fusions.fp8_layers is not None and model_run.active.adapted:
                fusions.fp8_layers.follow_adapters(self, model_run.active.on_gpu)
            # reading samples is no part of a graph, nor of the run before its capture
            captured = capturing() or reading()
            outermost = model_run.is_outermost(self) and not captured
            # fp8 weights are used even where other cached values are not
            fp8 = fusions.fp8_layers is not None
            needed = outermost and samples and (fp8 or model_run.checks_samples())
            check = samples.check() if needed else unchanged
            # wait before the forward if it must not run twice, or if there is no GPU to wait for
            first = needed and (
                not model_run.active.on_gpu or model_run.active.run_once is not None
            )
            if first and not check():
                samples.forget()
                check = unchanged
            result = ordered(self, *args, **kwargs)
            if outermost and model_run.active.on_gpu and checker.numerics == "exact":
                background.consider()
            if outermost and model_run.active.on_gpu:
                samples.prepare()
            if not check():  # waiting costs nothing here: the GPU has work to do
                result = None
                samples.forget()
                result = ordered(self, *args, **kwargs)
            return fusions.prompts.handed_out(result) if outermost else result

    def ordered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        blocks: Sequence[nn.Module | None] = ()
        if chain is not None:
            # somebody may have put another module in the place of a block, or around one
            blocks = [m if is_ours(m.__dict__.get("forward")) else None for m in chain(self)]
            key = number_of(signature(args, kwargs))
        elif model_run.is_outermost(self):
            key = None  # recorded blocks learn their order
        else:
            return runs_as(self, *args, **kwargs)
        with work_ahead.chain(blocks, key):
            return runs_as(self, *args, **kwargs)

    forward.fused = getattr(inner, "fused", None)  # type: ignore[attr-defined]
    return _marked(forward, getattr(inner, forwards.MARK, None))


def _marked(forward: Forward, patch: Patch | None) -> Forward:
    """Mark a forward as ours. It is called "forward" even if that of its class is not, since
    somebody replaced it there: a method is pickled by its name."""
    forward.__name__ = "forward"
    setattr(forward, forwards.MARK, patch)
    return forward
