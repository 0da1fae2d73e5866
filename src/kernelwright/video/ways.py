"""The configurations of a pipeline: plain diffusers, torch.compile, injected, and combinations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.torch_internals import forget_compiled
from ..errors import BadSetting
from ..inject import Report, injected
from ..inject.engine import NUMERICS


@dataclass(frozen=True)
class Way:
    """One configuration. `numerics` is None for plain diffusers."""

    numerics: str | None = None
    graphs: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.numerics not in (None, *NUMERICS):
            expected = f"{', '.join(NUMERICS[:-1])} or {NUMERICS[-1]}"
            raise BadSetting("--numerics", f"{self.numerics!r}, expected {expected}")
        if self.graphs and self.numerics is None:
            raise BadSetting("--graphs", "graphs need the kernels: add exact or fused, or fp8")

    @property
    def keeps_bits(self) -> bool:
        """Whether eager's bits are promised. torch.compile rounds where it chooses."""
        return self.numerics in (None, "exact") and not self.compiled

    def __str__(self) -> str:
        words = (self.numerics, self.graphs and "graphs", self.compiled and "compile")
        return "+".join(word for word in words if word) or "eager"

    @contextmanager
    def applied(self, pipe: Any) -> Iterator[Report | None]:
        """Run the pipeline this way during a `with` block."""
        with ExitStack() as stack:
            report = None
            if self.numerics is not None:
                how = injected(pipe, numerics=self.numerics, graphs=self.graphs)
                report = stack.enter_context(how)
            if self.compiled:
                stack.enter_context(_compiled_blocks(pipe.transformer))
            yield report


EAGER = Way()


def one_way(
    optimized: bool | None,
    numerics: str | None = None,
    graphs: bool = False,
    compiled: bool = False,
) -> Way:
    """The way that options describe. Kernels are injected unless turned off."""
    if optimized is False and numerics is not None:
        raise BadSetting("--numerics", "sets how the kernels round, but they are turned off")
    return Way(None if optimized is False else numerics or "exact", graphs, compiled)


def parse_ways(text: str) -> list[Way]:
    """Ways by name, comma-separated. Eager comes first, named or not: the others are compared with
    it.

    >>> [str(way) for way in parse_ways("exact+graphs,compile")]
    ['eager', 'exact+graphs', 'compile']
    """
    ways = [EAGER, *(_parse(name.strip()) for name in text.split(","))]
    return list(dict.fromkeys(ways))


def _parse(name: str) -> Way:
    words = name.split("+")
    tiers = [word for word in words if word in NUMERICS]
    known = name == "eager" or set(words) <= {*NUMERICS, "graphs", "compile"}
    if not known or len(tiers) > 1 or len(set(words)) < len(words):
        raise BadSetting(
            "--config",
            f"{name!r}, expected eager, or any of exact (fused, fp8), graphs, compile, joined by +",
        )
    if "graphs" in words and not tiers:
        raise BadSetting("--config", f"{name!r}: graphs need kernels: add exact or fused, or fp8")
    return Way(tiers[0] if tiers else None, "graphs" in words, "compile" in words)


@contextmanager
def _compiled_blocks(transformer: Any) -> Iterator[None]:
    """torch.compile by block, as diffusers recommends: one compilation serves all blocks."""
    torch.compiler.reset()
    transformer.compile_repeated_blocks()
    try:
        yield
    finally:
        for module in transformer.modules():
            forget_compiled(module)
