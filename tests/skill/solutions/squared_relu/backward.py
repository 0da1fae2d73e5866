"""Gradients: dx = dy * 2 * max(x, 0)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from kernelwright.ops.backward import Step, Values, empty_rows
from kernelwright.ops.row.reference import widen


class Gradients:
    """Tensors go by the names of the op's arguments and of its output `out`."""

    def reads(self, values: Values, wanted: Collection[str]) -> tuple[str, ...]:
        return ("input",)

    def reached(self, grads: Values, wanted: Collection[str]) -> list[str]:
        return list(wanted)

    def shared(self, values: Values) -> Mapping[str, str]:
        return {}

    def allocate(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        return {n: empty_rows(values["input"]) for n in wanted}

    def formula(self, grads: Values, values: Values, wanted: Collection[str]) -> dict[str, Tensor]:
        x, dy = widen(values["input"]), widen(grads["out"])
        dx = dy * (2 * torch.relu(x))
        return {"input": dx.to(values["input"].dtype)}

    def triton(self, grads: Values, values: Values, outs: dict[str, Tensor]) -> Iterator[Step]:
        # Triton is imported when a kernel is needed, not with the op
        from .backward_triton import plan

        yield Step(
            plan,
            {
                "dy": grads["out"],
                "input": values["input"],
                "dx": outs["input"],
            },
        )
