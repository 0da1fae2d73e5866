"""The picture of what an op fuses, made from its declaration: the eager chain that it replaces runs
on tensors without memory, and every step of it that would launch a kernel is a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from kernelwright.ops.case import Case, Inputs
from kernelwright.ops.op import Composite, Op
from kernelwright.report.markup import Html, joined, tag

# the chain that a reader is likeliest to have
CHAINS = ("diffusers", "transformers", "torch", "wan")
WIDTH, HALF, ROW = 760, 372, 22


@dataclass(frozen=True)
class Step:
    """One kernel of an eager chain: its name in PyTorch, and the bytes it reads and writes."""

    name: str
    moved: int


@dataclass(frozen=True)
class Fusion:
    """An op at one of its shapes, beside the eager steps that it replaces."""

    case: str
    chain: str
    steps: tuple[Step, ...]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    moved: int

    @property
    def eager_moved(self) -> int:
        return sum(step.moved for step in self.steps)


def fusion(op: Op | Composite) -> Fusion:
    """What an op fuses at a shape of LTX-Video, or at the first shape of a model it has."""
    case = _case(op)
    given = case.arguments(Inputs(torch.bfloat16, "meta"))
    chain = next((name for name in CHAINS if name in op.exact), "")
    eager = op.exact[chain] if chain else op.reference
    values = [given[name] for name in op.arguments] if isinstance(op, Op) else []
    named = {} if isinstance(op, Op) else given
    recorder = _Recorder()
    with torch.no_grad():
        eager(*values, **named)  # tables of angles are kept, and made now
        with recorder:
            result = eager(*values, **named)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    names = op.outputs if isinstance(op, Op) else ("out",) * len(results)
    return Fusion(
        case.name,
        chain,
        tuple(recorder.steps),
        {name: _shape(tensor) for name, tensor in tensors.items()},
        tuple(f"{name} {_shape(r)}" for name, r in zip(names, results, strict=False)),
        sum(map(_bytes, [*tensors.values(), *results])),
    )


def _case(op: Op | Composite) -> Case:
    shapes = [case for case in op.cases if case.large] or list(op.cases)
    return next((case for case in shapes if case.preset == "ltx"), shapes[0])


class _Recorder(TorchFunctionMode):
    """Writes down every call that would launch a kernel; views and questions do not."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        result = func(*args, **(kwargs or {}))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in known and t.numel()]
        if new:
            name = func.__name__.strip("_")
            self.steps.append(Step(name, sum(map(_bytes, [*given, *new]))))
        return result


def _bytes(t: Tensor) -> int:
    """Of the elements that are there: an expanded dimension is read once."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else 1
    return count * t.element_size()


def _shape(t: Tensor) -> str:
    kind = {"bfloat16": "", "float32": " fp32"}[str(t.dtype).removeprefix("torch.")]
    return f"[{', '.join(map(str, t.shape))}]{kind}"


def picture(op: Op | Composite) -> Html:
    """The eager steps on the left, each with a bar of the bytes it moves; the op on the right."""
    made = fusion(op)
    ours = [*(f"{name} {shape}" for name, shape in made.inputs.items()), "", *made.outputs]
    height = 58 + ROW * max(len(made.steps), len(ours) + 2)
    count = len(made.steps)
    whose = f"{made.chain} eager" if made.chain else "plain PyTorch"
    left = f"{whose}: {count} kernel{'s' if count > 1 else ''}, {_mb(made.eager_moved)}"
    right = f"{op.name}: one kernel, {_mb(made.moved)}"
    pieces = [_text(0, 18, left, "head"), _text(HALF + 24, 18, right, "head")]
    most = max(step.moved for step in made.steps)
    for number, step in enumerate(made.steps):
        y = 34 + ROW * number
        pieces += [
            tag("rect", x="0", y=f"{y}", width=f"{HALF - 20}", height="18", class_="track"),
            tag(
                "rect",
                x="0",
                y=f"{y}",
                width=f"{max(2, (HALF - 20) * step.moved / most):.0f}",
                height="18",
                class_="eager",
            ),
            _text(8, y + 13, step.name, "name"),
            _text(HALF - 26, y + 13, _mb(step.moved), "figure"),
        ]
    pieces += _kernel(op, ours, len(made.inputs))
    label = f"{left}. {right}."
    return tag(
        "svg",
        joined(pieces),
        viewBox=f"0 0 {WIDTH} {height}",
        class_="fusion",
        role="img",
        aria_label=label,
    )


def _kernel(op: Op | Composite, lines: list[str], inputs: int) -> Iterator[Html]:
    """Inputs above a box with the op's name, outputs below it."""
    x = HALF + 24
    for number, line in enumerate(lines):
        y = 34 + ROW * (number + (1 if number > inputs else 0))
        if number == inputs:
            yield tag(
                "rect",
                x=f"{x}",
                y=f"{y}",
                width=f"{WIDTH - x - 2}",
                height=f"{2 * ROW - 6}",
                rx="4",
                class_="ours",
            )
            yield _text(x + 12, y + 23, op.name, "inside")
        else:
            yield _text(x, y + 13, f"{line} →" if number < inputs else f"→ {line}", "name")


def _text(x: int, y: int, text: str, kind: str) -> Html:
    return tag("text", text, x=f"{x}", y=f"{y}", class_=kind)


def _mb(moved: int) -> str:
    return f"{moved / 1e6:.1f} MB" if moved >= 50_000 else "<0.1 MB"
