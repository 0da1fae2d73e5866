"""One call of the gated-unit kernel, as its Triton and CUDA planners see it."""

from __future__ import annotations

from typing import NamedTuple


class GluCall(NamedTuple):
    """act(a) * b: `pointers` name a, b and the output, `offsets` are where a and b begin in the
    rows of their tensors, `function` is "silu", "gelu_tanh" or "gelu_erf"."""

    pointers: tuple[str, str, str]
    offsets: tuple[int, int]
    function: str
