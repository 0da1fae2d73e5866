"""The configurations of a model: eager, injected, compiled, with CUDA graphs, and combinations.

"strict", "strict_pointwise" and "strict_reduction" are the numerics of torch.compile that are to be
closer to eager's, from torch 2.15 on. "compile+graphs" is torch.compile with its whole forward as
one CUDA graph; where that cannot be captured, or a model is trained, with Inductor's own graphs
(mode "reduce-overhead"). "autotune" is its mode "max-autotune", which times variants of every GEMM
and takes minutes to compile. "programs" is injection without recipes (`recipes=False`). "fa4" is
the extra `attention`. A configuration without "fa4" in its name runs as if the extra were not
installed, so that a name means the same on every machine. "torchao" is a copy of the model with
torchao's float8 layers, quantised by row when they run, in place of those that the tier "fp8"
quantises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..backends.torch_internals import forget_compiled, has_compile_option
from ..errors import CannotRun
from ..inject import injected
from ..inject.fp8.suitable_layers import unfit
from ..inject.graphs.recorder import CudaRecorder
from ..inject.report.report import Report
from ..library_internals import repeated_blocks
from ..ops.attention import without_fa4
from ..ops.attention.limits import fa4_installed

CONFIGS = (
    "eager",
    "exact",
    "exact+graphs",
    "exact+programs",
    "exact+programs+graphs",
    "fused",
    "fused+graphs",
    "fused+programs",
    "fused+programs+graphs",
    "compile",
    "compile+strict",
    "compile+strict_pointwise",
    "compile+strict_reduction",
    "compile+graphs",
    "compile+autotune",
    "compile+autotune+graphs",
    "exact+compile",
    "fused+compile",
    "exact+graphs+compile",
    "fused+graphs+compile",
    "fp8",
    "fp8+graphs",
    "fp8+programs",
    "fp8+programs+graphs",
    "fused+fa4+graphs",
    "fp8+fa4+graphs",
    "fp8+compile",
    "torchao",
    "torchao+compile",
    "torchao+compile+graphs",
)


STRICT = ("strict", "strict_pointwise", "strict_reduction")


class Compilation:
    """What torch.compile has made of a model without injection, kept for the next configuration if
    that differs in graphs alone: torchao has each kernel tuned, which takes minutes."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: tuple[tuple[str, ...], Callable[..., Any]] | None = None
        self.reused = False

    def of(self, model: nn.Module, parts: Sequence[str]) -> Callable[..., Any]:
        what = _compiled_parts(parts)
        self.reused = self._made is not None and self._made[0] == what
        if self._made is None or not self.reused:
            self.close()
            self._made = what, _compiled(_quantised(model, parts), self._stack, what)
        return self._made[1]

    def keep_for(self, parts: Sequence[str]) -> None:
        """Undo what a configuration of these parts does not use."""
        if self._made is not None and self._made[0] != _compiled_parts(parts):
            self.close()

    def close(self) -> None:
        self._made, self.reused = None, False
        self._stack.close()


def _compiled_parts(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for part in parts if part != "graphs")


def configured(
    model: nn.Module,
    config: str,
    stack: ExitStack,
    trains: bool = False,
    compilation: Compilation | None = None,
) -> tuple[Callable[..., Any], Report | None]:
    """The callable for `model` in this configuration, until `stack` closes, and inject's report.
    `trains`: whether gradients are recorded; `compilation`: of the configurations before."""
    parts = config.split("+")
    report = None
    if compilation is None:
        compilation = Compilation()
        stack.callback(compilation.close)
    compilation.keep_for(parts)
    if "fa4" not in parts:
        stack.enter_context(without_fa4())
    elif not fa4_installed():
        raise CannotRun("flash-attn-4 is not installed: pip install 'kernelwright[attention]'")
    if tier := tier_of(config):
        ways: dict[str, Any] = {"recipes": False} if "programs" in parts else {}
        how = injected(model, numerics=tier, graphs="graphs" in parts, **ways)
        report = stack.enter_context(how)
    if "compile" not in parts:
        return _quantised(model, parts), report
    if tier is not None:
        return _compiled(model, stack, parts), report
    if "graphs" not in parts:
        return compilation.of(model, parts), report
    if not torch.cuda.is_available():
        raise CannotRun("CUDA graphs need a GPU")
    if trains:
        return _step_by_step(_compiled(model, stack, parts, own_graphs=True)), report
    return _captured(model, compilation, stack, parts), report


def tier_of(config: str) -> str | None:
    """The `numerics` for `inject`, or None for a configuration without injection."""
    return next((p for p in config.split("+") if p in ("exact", "fused", "fp8")), None)


def is_peer(config: str) -> bool:
    """Whether it is something to compare with: none of our kernels, and not eager."""
    return config != "eager" and (config == "liger" or tier_of(config) is None)


def _quantised(model: nn.Module, parts: Sequence[str]) -> nn.Module:
    return _with_torchao(model) if "torchao" in parts else model


def _with_torchao(model: nn.Module) -> nn.Module:
    """A copy with torchao's dynamic float8 layers, with a scale for each row."""
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            PerRow,
            quantize_,
        )
    except ImportError as no:
        raise CannotRun(f"torchao cannot be imported ({no}): pip install torchao") from None
    twin = copy.deepcopy(model)

    def wanted(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and unfit(name, module) is None

    quantize_(twin, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), wanted)
    return twin


def _compiled(
    model: Any, stack: ExitStack, parts: Sequence[str] = (), own_graphs: bool = False
) -> Callable[..., Any]:
    """Compile block by block where the library names the blocks, as diffusers recommends."""
    strict = next((part for part in parts if part in STRICT), None)
    if strict is not None and not has_compile_option("numerics"):
        raise CannotRun(f"torch.compile of torch {torch.__version__} has no numerics {strict!r}")
    how: dict[str, Any] = {} if strict is None else {"options": {"numerics": strict}}
    if own_graphs:
        how["mode"] = "max-autotune" if "autotune" in parts else "reduce-overhead"
    elif "autotune" in parts:  # without its own graphs, which copy every input of every block
        how["mode"] = "max-autotune-no-cudagraphs"
    torch.compiler.reset()
    stack.callback(torch.compiler.reset)  # it would keep the model and its graphs in memory
    repeated = repeated_blocks(model)
    blocks = [m for m in model.modules() if type(m).__name__ in repeated]
    if not blocks:
        return torch.compile(model, **how)
    for block in blocks:
        block.compile(**how)

    def undo() -> None:
        for block in blocks:
            forget_compiled(block)

    stack.callback(undo)
    return model


def _captured(
    model: Any, compilation: Compilation, stack: ExitStack, parts: Sequence[str]
) -> Callable[..., Any]:
    """A compiled model as one CUDA graph, at least as fast as torch.compile's own graphs (mode
    "reduce-overhead"): inputs are not copied, and blocks that were compiled apart share a graph.
    Its own graphs are used where that one cannot be captured: transformers makes other masks during
    a capture, for which blocks would be compiled again."""
    compiled, recorder = compilation.of(model, parts), CudaRecorder()
    runs: dict[str, Any] = {}

    def graph_of(inputs: dict[str, Any]) -> Callable[..., Any]:
        compiled(**inputs)  # compile before the capture
        device = torch.device("cuda", torch.cuda.current_device())
        replay, result = recorder.record(lambda: compiled(**inputs), device)

        def run(**given: Any) -> Any:
            if any(value is not inputs[name] for name, value in given.items()):
                raise ValueError("a graph replays the inputs that it was captured with")
            replay()
            return result

        return run

    def first_or_next(**inputs: Any) -> Any:
        if not runs:
            try:
                runs["graphs"], said = graph_of(inputs), "1 graph"
            except RuntimeError as no:
                compilation.close()
                own = _compiled(_quantised(model, parts), stack, parts, own_graphs=True)
                why = str(no).strip().partition("\n")[0]
                runs["graphs"], said = _step_by_step(own), f"torch.compile's own graphs: {why}"
            first_or_next.graph_lines = [said]  # type: ignore[attr-defined]
        return runs["graphs"](**inputs)

    return first_or_next


def _step_by_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, telling Inductor's graphs that each call begins a step: they may overwrite what the
    one before has left."""

    def step(**inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(**inputs)

    return step
