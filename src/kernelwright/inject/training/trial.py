"""One comparison of a block's programs with autograd, on numbers that prove something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...fuser.joint_recording import (
    Call,
    Differentiated,
    Joint,
    differentiate,
    rehearse_forward,
)
from ...fuser.recording import WRITES_TO_BUFFERS, CannotRecord, copied
from ...fuser.views import packet
from ..runtime.sites import DIFFERS, equal, same_strides, set_mode
from .block_programs import BoundBlock, Layouts
from .random_numbers import Numbers


@dataclass
class Trial:
    """A block's own forward and backward, and what they gave."""

    module: nn.Module  # a twin of the block
    call: Call
    values: list[Tensor]  # its weights and inputs
    gradients: list[Tensor | None]  # of its results
    differentiable: list[int]  # the numbers of the results that have a gradient
    expected: Differentiated

    @staticmethod
    def of(
        twin: nn.Module,
        call: Call,
        tensors: Sequence[Tensor],
        layouts: Layouts | None,
        rehearsed: bool,
    ) -> Trial:
        """Run a block as autograd does it, with gradients of these layouts. Zeros and NaN among its
        tensors become random numbers. Raises CannotRecord before anything runs that must not run
        twice, unless that was `rehearsed` with a block of the same structure."""
        # inputs and buffers are copied: a forward that turns out to write to them must not do so
        # twice
        parameters = [isinstance(t, nn.Parameter) for t in tensors]
        values = [
            t.detach() if own else copied(t.detach())
            for own, t in zip(parameters, tensors, strict=True)
        ]
        if not rehearsed:
            rehearse_forward(twin, call, values)
        draw = Numbers()
        values = list(map(draw.instead_of_zeros, values))
        buffers = [values[i] for i in range(len(call.names)) if not parameters[i]]
        before = [t.clone() for t in buffers]
        gradients: list[Tensor | None] = []
        differentiable: list[int] = []

        def drawn(results: Sequence[Tensor]) -> list[Tensor | None]:
            differentiable[:] = [i for i, r in enumerate(results) if r.grad_fn is not None]
            wanted = layouts or [r if r.grad_fn is not None else None for r in results]
            gradients[:] = map(draw.gradient, wanted)
            return gradients

        expected = differentiate(twin, call, values, drawn)
        if not equal(buffers, before):  # batch norm's op does not say so
            raise CannotRecord(WRITES_TO_BUFFERS)
        return Trial(twin, call, values, gradients, differentiable, expected)

    def problem(self, bound: BoundBlock) -> str | None:
        """Why the programs are not used, or None. Those that alone differ are set off."""
        expected, known = self.expected, dict[str, Any]()
        if self._same(bound, expected):
            return None
        again = differentiate(self.module, self.call, self.values, lambda _: self.gradients)
        repeats = bound.repeats
        # an op that does not repeat itself is held fast. Two runs of such an op may give the same
        # bits by chance, and a third, ours, others
        if not all(repeats) or not _equal(again, expected):
            expected, known = self._by_ops(bound.programs.joint)
            if not _agree(expected, self.expected, again, repeats):
                return f"a gradient of the ops that autograd runs {DIFFERS}"
            if self._same(bound, expected, known):
                return None
        off: dict[str, str] = {}
        with set_mode(off=off, notes=Counter(), comparing=True, eager=False):
            self._run(bound, known)
        with set_mode(off=off, eager=False):
            same = bool(off) and self._same(bound, expected, known)
        if not same:
            return f"a gradient {DIFFERS}"
        bound.off = off
        return None

    def _same(
        self, bound: BoundBlock, expected: Differentiated, known: dict[str, Any] | None = None
    ) -> bool:
        return _equal(self._run(bound, known or {}), expected)

    def _run(self, bound: BoundBlock, known: dict[str, Any]) -> Differentiated:
        programs = bound.programs
        joint = programs.joint
        forward = programs.forward.with_results(known) if known else None
        backward = programs.backward.with_results(known) if known else None
        with torch.no_grad():
            made, kept = programs.run_forward(self.values, forward)
            found = programs.run_backward(self.values, kept, self.gradients, backward)
        results = dict(zip(programs.parted.results, made, strict=True))
        results |= {i: self.values[n] for i, n in joint.handed_on.items()}
        return Differentiated(
            [results[i] for i in range(joint.results)],
            joint.returns,
            joint.handed_on,
            list(zip(joint.contributions, found, strict=True)),
        )

    def _by_ops(self, joint: Joint) -> tuple[Differentiated, dict[str, Any]]:
        """What the ops give that autograd runs, and the results of attention among them."""
        run = _Noting(joint)
        with torch.no_grad():
            made = run.run(*self.values, *(g for g in self.gradients if g is not None))
        results, found = made[: joint.results], made[joint.results :]
        contributions = list(zip(joint.contributions, found, strict=True))
        return Differentiated(results, joint.returns, joint.handed_on, contributions), run.known


def _equal(a: Differentiated, b: Differentiated) -> bool:
    """Whether results and contributions have the same bits, in the same order."""
    ours, theirs = ([n for n, _ in d.contributions] for d in (a, b))
    if ours != theirs or not equal(a.outputs, b.outputs) or not same_strides(a.outputs, b.outputs):
        return False
    return equal([t for _, t in a.contributions], [t for _, t in b.contributions])


def _agree(
    ops: Differentiated, first: Differentiated, second: Differentiated, repeats: Sequence[bool]
) -> bool:
    """Whether what the ops give is what autograd gave, where that repeats itself and both of its
    runs did."""
    names, expected = ([n for n, _ in d.contributions] for d in (ops, first))
    if names != expected:
        return False

    def fixed(found: Differentiated) -> list[Any]:
        return [t for (_, t), same in zip(found.contributions, repeats, strict=True) if same]

    if not equal(first.outputs, second.outputs):  # nor does the forward repeat itself
        return True
    if not equal(ops.outputs, first.outputs):
        return False
    return not equal(fixed(first), fixed(second)) or equal(fixed(ops), fixed(first))


class _Noting(fx.Interpreter):
    """Runs a graph op by op, and keeps the results of attention."""

    def __init__(self, joint: Joint) -> None:
        nodes = joint.graph.find_nodes(op="get_attr")
        root = {n.target: joint.constants[n.name] for n in nodes}
        super().__init__(fx.GraphModule(root, joint.graph))
        self.known: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "attention" in str(packet(n)):
            self.known[n.name] = result
        return result
