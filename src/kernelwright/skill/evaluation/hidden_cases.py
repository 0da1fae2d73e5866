"""Arguments of the hidden tests: every request in every layout where kernels break."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...ops.case import Case, Inputs
from .requests import OPTIONAL, ROWS, Request


def _plain(*shape: int, scale: float = 2.0) -> Callable[[Inputs], Tensor]:
    return lambda inputs: inputs.normal(*shape, scale=scale)


# a row operand of each layout; the arguments of a call are drawn one after another
LAYOUTS: dict[str, Callable[[Inputs], Tensor]] = {
    "rows": _plain(2, 3, 64),
    "odd width": _plain(5, 37),
    "width 1": _plain(4, 1),
    "wide": _plain(3, 3000),
    "many narrow rows": _plain(2, 40, 24),
    "vector": _plain(72),
    "four dimensions": _plain(2, 2, 3, 16),
    "large values": _plain(3, 128, scale=40.0),
    "tiny values": _plain(3, 128, scale=1e-3),
    "slice": lambda inputs: inputs.normal(3, 5, 160, scale=2.0)[..., 32:128],
    "transposed": lambda inputs: inputs.normal(3, 4, 5, 40).transpose(1, 2),
    "columns apart": lambda inputs: inputs.normal(6, 40, 3)[..., 1],
    "expanded": lambda inputs: inputs.normal(1, 6, 48).expand(4, 6, 48),
    "storage offset": lambda inputs: inputs.normal(4 * 56 + 1)[1:].view(4, 56),
    "no rows": _plain(0, 64),
}


def hidden_cases(request: Request) -> Iterator[Case]:
    """Every layout with the defaults; every other number, and each optional tensor absent, on
    plain rows."""
    defaults = {n: values[0] for n, values in request.numbers.items()}
    for layout in LAYOUTS:
        yield _case(request, layout, layout, defaults)
    for name, values in request.numbers.items():
        for value in values[1:]:
            yield _case(request, f"{name}={value!r}", "odd width", defaults | {name: value})
    for name, kind in request.tensors.items():
        if kind == OPTIONAL:
            yield _case(request, f"no {name}", "rows", defaults, absent=name)


def _case(
    request: Request, name: str, layout: str, numbers: dict[str, float], absent: str = ""
) -> Case:
    def arguments(inputs: Inputs) -> dict[str, object]:
        found: dict[str, object] = {}
        width = 0
        for argument, kind in request.tensors.items():
            if argument == absent:
                found[argument] = None
            elif kind == ROWS:
                rows = LAYOUTS[layout](inputs)
                found[argument], width = rows, rows.shape[-1]
        for argument, kind in request.tensors.items():
            if kind != ROWS and argument != absent:
                found[argument] = _vector(inputs, width)
        return {n: found[n] for n in request.tensors} | numbers

    return Case(name, arguments)


def _vector(inputs: Inputs, width: int) -> Tensor:
    """Around one, away from zero: a divisor in some formulas."""
    drawn = inputs.normal(width, scale=0.3, mean=1.0)
    return drawn if drawn.device.type == "meta" else torch.where(drawn.abs() < 0.1, 1.0, drawn)
