"""Runs the programs of a recorded block: as kernels, and beside PyTorch's ops while compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...backends import Unsupported
from ...fuser import interpreter
from ...fuser.launching import Launched
from ...fuser.program import Program
from ..runtime.sites import mode, site


class ProgramSites:
    """Runs the programs of one recording, each as a site of its own."""

    def __init__(
        self,
        kind: str,
        programs: Sequence[Program],
        launched: Mapping[int, Launched],
        fell_back: Counter[tuple[str, str]],
    ) -> None:
        self.names = {id(p): f"program {i + 1} of {kind}" for i, p in enumerate(programs)}
        self.launched, self.fell_back = launched, fell_back

    def launcher(
        self, program: Program, places: Mapping[str, int]
    ) -> Callable[[list[Any]], bool] | None:
        """What launches a program, unless it is compared or one of its addresses does not fit."""
        if id(program) not in self.launched:
            return None
        launch = self.launched[id(program)].bound(places)
        return lambda values: mode.notes is None and not mode.off and launch(values)

    def __call__(self, program: Program, given: Any, outputs: Any) -> None:
        if mode.notes is None and not mode.off:
            return self._kernel(program, given, outputs)
        site(
            self.names[id(program)],
            partial(self._eager, program, given, outputs),
            partial(self._result, program, given, outputs),
            # zeros there would prove nothing about the order of sums. Other steps are single ops,
            # whose bits do not depend on their neighbours
            *(given[source] for source in program.summed),
        )
        return None

    def _result(self, program: Program, given: Any, outputs: Any) -> list[Tensor]:
        try:
            self._kernel(program, given, outputs)
        except Unsupported as no:
            raise ValueError(str(no)) from no
        return _compared(program, outputs)

    def _kernel(self, program: Program, given: Any, outputs: Any) -> None:
        if not self.launched:
            return interpreter.run(program, given, outputs)
        try:
            return self.launched[id(program)]({**given, **outputs})
        except Unsupported as no:
            if mode.notes is not None:
                raise
            # a weight that was moved to an address that no vector begins at
            self.fell_back[self.names[id(program)], str(no)] += 1
            return interpreter.run(program, given, outputs)

    @staticmethod
    def _eager(program: Program, given: Any, outputs: Any) -> list[Tensor]:
        """The program with PyTorch's ops. A comparison calls it beside the kernel, and then what it
        returns is compared; otherwise what it writes is the result."""
        into = outputs if not mode.eager else {n: t.clone() for n, t in outputs.items()}
        interpreter.run(program, given, into)
        return _compared(program, into)


def _compared(program: Program, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a program stores; rows in eight bits are compared with what GEMMs make of them."""
    return [outputs[s.target] for s in program.stores]
