"""Attention in eight bits for the tier "fp8".

The first time a module attends at one size, the result is compared with that of 16-bit attention:
if it is off by more than LIMIT, that module keeps 16 bits, and the report says so. Masks, short
sequences such as text, and head dimensions that are not served stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...backends.user_warnings import warn
from ...ops.fp8_attention import fp8_attention, missing, problem
from ..graphs.capture import capturing
from ..graphs.host_reads import reading
from ..runtime import model_run
from ..runtime.informative import informative
from ..runtime.input_key import in_words
from ..runtime.sites import mode
from ..verify import accuracy
from ..verify.findings import Finding, Findings

KIND = "attention"
DOES = "attention in eight bits"
# Values and probabilities in fp8 leave an error of 3.7%, query and key as int8 one of 1.3%, and
# powers of two on straight lines 1.9%: 4.3% together. Much more than that means that outliers in a
# head have cost its small values.
LIMIT = 0.078
# Head dimensions that are served, and the fewest queries and keys. Timed on H200 beside cuDNN in
# 16 bits, with quantising (results/h200/fp8-attention.json): of head_dim 128 it is 2.02 times as
# fast at 32,760 tokens, 1.40 at 4,608, 1.21 at 2,816 and 1.04 at 1,536, for which its error is too
# large; of head_dim 64 2.19 times at 17,776, 1.49 at 2,688, 1.30 at 1,320 and 1.15 at 1,178.
SERVED: dict[int, int] = {64: 1152, 128: 2816}
MAX_VERDICTS = 4096


@dataclass(eq=False)
class Fp8Attention:
    """Which modules of one injection attend in eight bits."""

    findings: Findings
    _verdicts: dict[Any, bool] = field(default_factory=dict)
    _missing: dict[torch.device, str | None] = field(default_factory=dict)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        in_16_bits: Callable[[], Tensor],
        scale: float | None = None,
    ) -> Tensor | None:
        """softmax(query @ key^T * scale) @ value over [batch, heads, tokens, dim] in eight bits, or
        None where it has to run in 16 bits."""
        if not self._may_attend(query, key, value):
            return None
        place = mode.owner, mode.cache_scope, query.shape, key.shape
        good = self._verdicts.get(place)
        if good is False or (good is None and (capturing() or reading())):
            return None
        try:
            result = fp8_attention(query, key, value, scale)
        except ValueError as no:  # no kernel for these operands
            if good is None:
                self._keep(place, False)
                self._report(self._site(), query, f"stays in 16 bits: {no}", None)
            return None
        return result if good else self._first_sight(place, query, result, in_16_bits())

    def _may_attend(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        if torch.compiler.is_compiling() or mode.eager or not mode.fp8 or not mode.owner:
            return False
        least = SERVED.get(query.shape[-1])
        if least is None or min(query.shape[2], key.shape[2]) < least:
            return False
        if not model_run.active.token or torch.is_autocast_enabled(query.device.type):
            return False
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            return False
        if any(type(t) is not Tensor for t in (query, key, value)):
            return False
        return problem(query, key, value) is None and not self._is_missing(query)

    def _is_missing(self, query: Tensor) -> bool:
        """Whether its kernel cannot be compiled here; the report says so once."""
        if query.device not in self._missing:
            self._missing[query.device] = why = missing(query)
            if why is not None:
                self._report("attention", query, f"stays in 16 bits: {why}", None)
        return self._missing[query.device] is not None

    def _first_sight(self, place: Any, query: Tensor, result: Tensor, expected: Tensor) -> Tensor:
        if not informative(expected):
            return expected  # zeros and NaN prove nothing: compare again at the next call
        error = accuracy.error(result, expected)
        good = error <= LIMIT
        self._keep(place, good)
        why = f"off by {error:.1%} in eight bits" if math.isfinite(error) else "not finite"
        problem = None if good else f"stays in 16 bits: {why}"
        self._report(self._site(), query, problem, error)
        return result if good else expected

    def _keep(self, place: Any, good: bool) -> None:
        if len(self._verdicts) >= MAX_VERDICTS:  # a service that keeps getting new sizes
            self._verdicts.clear()
        self._verdicts[place] = good

    def _site(self) -> str:
        """The attention of the module that runs now, in words."""
        owner = next((n for m, n in self.findings.names.items() if id(m) == mode.owner), "a module")
        return f"{owner}, attention"

    def _report(self, name: str, query: Tensor, problem: str | None, error: float | None) -> None:
        """Add a finding; warn if attention stays in 16 bits."""
        inputs = in_words((query,), {})
        sites = {(DOES, problem or "fused"): 1}
        self.findings.findings.append(
            Finding(name, KIND, inputs, sites, error=error, problem=problem)
        )
        if problem:
            warn(f"{name} at {inputs}: {problem}")
