"""Where the values of a run are, and what finds the arguments of its steps among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import fx

from .argument_views import Layout, layout, lies_in, view
from .steps_apart import Values


class ValuePlaces:
    """The places of values in a list, by the names of nodes: those of inputs, of constants, and of
    what steps write. A node without one is a view of another node.

    `start` is the list before a run, with the constants in it. `stored` are the layouts of values
    that are allocated otherwise than they were recorded.
    """

    def __init__(self, stored: Mapping[str, Layout]) -> None:
        self.of: dict[Any, int] = {}
        self.start: Values = []
        self._stored = stored

    def new(self, name: Any) -> int:
        """The place of this name, from now on."""
        if name not in self.of:
            self.of[name] = len(self.start)
            self.start.append(None)
        return self.of[name]

    def base(self, node: fx.Node) -> fx.Node:
        """The node with a place that a node is, or is a view of."""
        while node.name not in self.of:
            node = node.all_input_nodes[0]
        return node

    def output_readers(self, outputs: Sequence[Any]) -> list[Callable[[Values], Any]]:
        """What finds the outputs. A view of an input or of what another output is in, too, stays a
        view, even if it lies just so."""
        nodes = [o for o in outputs if isinstance(o, fx.Node)]
        bases = Counter(self.base(o) for o in nodes)

        def reader(o: Any) -> Callable[[Values], Any]:
            if not isinstance(o, fx.Node) or (base := self.base(o)) is o:
                return self.reader(o)
            if base.op != "placeholder" and bases[base] == 1:
                return self.reader(o)
            return view(self.of[base.name], *lies_in(o, base))

        return list(map(reader, outputs))

    def reader(self, value: Any) -> Callable[[Values], Any]:
        """What finds an argument among the values."""
        if isinstance(value, fx.Node):
            base = self.base(value)
            place = self.of[base.name]
            if self._lies_as_wanted(value, base):
                return value_at(place)
            return view(place, *lies_in(value, base))
        if isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value):
            readers, kind = [self.reader(v) for v in value], type(value)
            return lambda values: kind([read(values) for read in readers])
        return lambda values: value

    def arguments(self, args: Sequence[Any]) -> Callable[[Values], Iterable[Any]]:
        """What finds all arguments of an op among the values."""
        places = [self._place_of(a) for a in args]
        if len(args) < 2 or None in places:  # of a single place, `itemgetter` makes no tuple
            readers = [self.reader(a) for a in args]
            return lambda values: [read(values) for read in readers]
        return itemgetter(*places)

    def _place_of(self, value: Any) -> int | None:
        """The place of a value or of a constant; None for views and lists of values."""
        if isinstance(value, fx.Node):
            base = self.base(value)
            return self.of[base.name] if self._lies_as_wanted(value, base) else None
        if isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value):
            return None
        place = self.new(object())  # a name that nothing else has
        self.start[place] = value
        return place

    def _lies_as_wanted(self, value: fx.Node, base: fx.Node) -> bool:
        """Whether a value is what lies at the place of its base: a matrix that is transposed twice
        needs no view, nor does one that was allocated as its readers want it."""
        stored = self._stored.get(base.name)
        if base is value:
            return stored is None
        return lies_in(value, base) == (*(stored or layout(base)), 0)

    def read_by(self, value: Any) -> set[int]:
        """The places of all values that an argument is made of."""
        found: set[int] = set()
        fx.node.map_arg(value, lambda n: found.add(self.of[self.base(n).name]))
        return found


def value_at(place: int) -> Callable[[Values], Any]:
    return itemgetter(place)
