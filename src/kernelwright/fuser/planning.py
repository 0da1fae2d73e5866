"""Which nodes of a recorded graph are computed together in one program, and which are stored.

GEMMs, attention and ops that are not known here stay PyTorch's. A node between them is stored if
one of these reads it, or if programs in different *stages* need it and computing it again would
read more than storing it does. The stage of a node is the number of PyTorch's ops on the longest
way to it: programs of one stage do not wait for each other. Stores of one stage that share what
they are made of are one program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from .building import REDUCTIONS, Builder
from .eight_bit_rows import with_eight_bit_rows
from .grouping import SMALL, Group, Grouping, MadeOf
from .index import Affine, CannotIndex, Cut, Space, Split
from .layouts import in_rows
from .merging import merged
from .node_kinds import NodeKinds
from .norms import is_norm
from .program import Program, Store
from .recording import Recording
from .views import packet, shape_of

# splits and cuts of variables before a program is given up
MAX_CHANGES = 16


@dataclass
class Plan:
    """What to run, in order: nodes of PyTorch, and programs."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    steps: list[fx.Node | Program]
    ops: int  # how many ops of the graph are inside programs
    left: dict[str, int] = field(default_factory=dict)  # ops that stay PyTorch's, and how often
    refused: list[str] = field(default_factory=list)  # why some of these have no program
    values: dict[str, Any] = field(default_factory=dict)  # what each node gave when recorded
    given: int = 0  # how many of the inputs, the last ones, are no weights
    handed: int = 0  # how many of those, the last ones, belong to this call of the block alone


# why a program cannot be run, or None if it can: (program, value of each node by name)
Check = Callable[[Program, Mapping[str, Any]], str | None]


def plan(recording: Recording, check: Check | None = None) -> Plan:
    """Programs for everything between the ops that stay PyTorch's. The ops of a program for which
    `check` has a reason stay PyTorch's as well."""
    left: dict[fx.Node, str] = {}
    values = {n.name: n.meta.get("val") for n in recording.graph.nodes}

    def is_good(program: Program) -> bool:
        return check is None or check(program, values) is None

    while True:
        planner = _Planner(recording, left)
        try:
            found = planner.made(is_good)
        except _Leave as no:
            left |= dict.fromkeys(no.nodes, no.why)
            continue
        refused = {
            node: why
            for program in found.steps
            if check is not None and isinstance(program, Program)
            for why in [check(program, values)]
            if why is not None
            for node in planner.to_leave(program)
        }
        if not refused:
            found.refused, found.values = sorted(set(left.values())), values
            found.given, found.handed = len(recording.paths), recording.handed
            found.steps = in_rows(found.steps, values, planner.kept)
            values |= _copies(found.steps, values)
            found.steps = with_eight_bit_rows(found.steps, recording.graph, is_good)
            return found
        left |= refused


def _copies(steps: list[fx.Node | Program], values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What programs store that is no node of the graph: how it lies, without memory."""
    stores = [s for step in steps if isinstance(step, Program) for s in step.stores]
    return {
        s.target: torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device="meta")
        for s in stores
        if s.target not in values
    }


class _Planner:
    def __init__(self, recording: Recording, left: Collection[fx.Node]) -> None:
        graph = recording.graph
        self.graph, self.constants = graph, recording.constants
        self.kinds = NodeKinds(graph, left)
        self.stage = self._stages()
        # what PyTorch's ops and the caller read
        self.stored: set[fx.Node] = {
            self.kinds.base[i]
            for n in (*self.kinds.leaves, *graph.find_nodes(op="output"))
            for i in n.all_input_nodes
            if self.kinds.base[i] in self.kinds.computed
        }
        self.made_of = MadeOf(self.kinds, self.stored)
        self.kept = {n.name for n in self.stored}
        self.memory: frozenset[fx.Node] = frozenset()  # as of the last call of `_programs`
        self.apart: set[fx.Node] = set()  # stored by programs without guests: see grouping.py

    def _stages(self) -> dict[fx.Node, int]:
        leaves = set(self.kinds.leaves)
        stage: dict[fx.Node, int] = {}
        for n in self.graph.nodes:
            stage[n] = max((stage[i] + (i in leaves) for i in n.all_input_nodes), default=0)
        return stage

    def made(self, is_good: Callable[[Program], bool]) -> Plan:
        while True:
            self._store_what_is_shared()
            try:
                programs = self._programs(is_good)
                break
            except _Store as again:
                if again.node in self.stored:
                    raise CannotIndex(f"{again.node.name}: {again.why}") from again
                self.stored.add(again.node)
            except _Apart as again:
                self.apart |= again.guests
        stage = {n.name: self.stage[n] for n in self.stored}
        return self._ordered(merged(programs, stage, is_good))

    def _sinks(self) -> dict[fx.Node, set[fx.Node]]:
        """For each computed node the stored ones that are made of it, up to the next stored."""
        sinks: dict[fx.Node, set[fx.Node]] = {n: set() for n in self.graph.nodes}
        for n in reversed(list(self.graph.nodes)):
            for user in n.users:
                if user in self.stored:
                    sinks[n].add(user)
                elif not self.made_of.in_memory(user):
                    sinks[n] |= sinks[user]
        return sinks

    def _store_what_is_shared(self) -> None:
        """Add nodes that several stages need, where computing them again would read more."""
        sinks = self._sinks()
        # the last first: what it is made of is then needed by its own stage alone
        for n in reversed(list(self.graph.nodes)):
            if n not in self.kinds.computed or n in self.stored or len(sinks[n]) < 2:
                continue
            stages = {self.stage[s] for s in sinks[n]}
            largest = max(prod(shape_of(s)) for s in sinks[n])
            if len(stages) < 2 or prod(shape_of(n)) * SMALL < largest:
                continue
            sources = self.made_of.sources(n)
            several = sum(prod(shape_of(s)) * SMALL >= prod(shape_of(n)) for s in sources) > 1
            if several or any(is_row(m) for m in self.made_of.inlined(n)):
                self.stored.add(n)
                sinks = self._sinks()

    def to_leave(self, program: Program) -> set[fx.Node]:
        """What stays PyTorch's of a program that has no kernel: its norms and sums, of which few
        orders are known, and everything if it has none."""
        targets = {s.target for s in program.stores}
        nodes = [n for n in self.graph.nodes if n.name in targets]
        inlined: set[fx.Node] = set().union(*(self.made_of.inlined(n) for n in nodes))
        computed = inlined & (self.kinds.computed | self.kinds.norms)
        return {n for n in computed if is_row(n)} or computed

    def _programs(self, is_good: Callable[[Program], bool]) -> list[Program]:
        self.memory = frozenset(n for n in self.graph.nodes if self.made_of.in_memory(n))
        made: list[Program] = []
        grouping = Grouping(self.graph, self.kinds, self.stage, self.made_of, self.apart)
        for group in grouping.groups():
            try:
                built = self._built(group)
            except _Store as no:
                raise _Apart(group.guests) if group.guests else no from None
            if group.guests and not (len(built) == 1 and is_good(built[0])):
                raise _Apart(group.guests)
            made += built
        return made

    def _built(self, group: Group) -> list[Program]:
        """The expressions of a group, in as many programs as its parts are made differently."""
        done: list[Program] = []
        boxes: list[_Box] = [_Box()]
        while boxes:
            box = boxes.pop()
            try:
                done.append(self._program(group, box))
            except Split as split:
                boxes.append(box.split(split))
            except Cut as cut:
                boxes += box.cut(cut)
            except CannotIndex as no:
                raise _Store(self._to_store(group.nodes, no.node, str(no)), str(no)) from no
            if box.changes > MAX_CHANGES:
                why = "too many splits"
                raise _Store(self._to_store(group.nodes, None, why), why)
        return done

    def _program(self, group: Group, box: _Box) -> Program:
        space = Space()
        index = tuple(box.variable(space, f"d{i}", n) for i, n in enumerate(group.shape))
        builder = Builder(space, self.memory.difference(group.nodes))
        of_row = (*index[:-1], Affine())
        stores = tuple(
            self._store(builder, n, index if shape_of(n) == group.shape else of_row)
            for n in group.nodes
        )
        return Program(tuple(space.extents.items()), stores)

    def _to_store(self, group: list[fx.Node], failed: fx.Node | None, why: str) -> fx.Node:
        """What has to be stored so that a node need not be built: it, or what it is a view of."""
        if failed is not None:
            base = self.kinds.base[failed]
            if base in self.kinds.computed and base not in self.stored:
                return base
        inlined = set().union(*map(self.made_of.inlined, group)) & self.kinds.computed - self.stored
        if not inlined:
            raise _Leave(group, f"{group[0].target}: {why}")
        return max(inlined, key=list(self.graph.nodes).index)

    def _store(self, builder: Builder, node: fx.Node, index: tuple[Affine, ...]) -> Store:
        value = node.meta["val"]
        made = builder.at(node, index, inline=True)
        return Store(node.name, index, made, tuple(value.shape), value.stride(), value.dtype)

    def _ordered(self, programs: list[Program]) -> Plan:
        """Each program as soon as what it loads is there."""
        by_target: dict[str, list[Program]] = {}
        for p in programs:
            for s in p.stores:
                by_target.setdefault(s.target, []).append(p)
        leaves = {n.name: n for n in self.kinds.leaves}
        steps: list[fx.Node | Program] = []
        done: set[int] = set()

        def run(name: str) -> None:
            """Add what makes this tensor, after what that needs."""
            for program in by_target.get(name, ()):
                if id(program) not in done:
                    done.add(id(program))
                    for needed in program.loads:
                        run(needed)
                    steps.append(program)
            leaf = leaves.get(name)
            if leaf is not None and id(leaf) not in done:
                done.add(id(leaf))
                for i in leaf.all_input_nodes:
                    run(self.kinds.base[i].name)
                steps.append(leaf)

        for n in self.graph.nodes:
            if n.name in leaves:
                run(n.name)
        for program in programs:
            run(program.stores[0].target)
        left: dict[str, int] = {}
        for n in steps:
            if isinstance(n, fx.Node):
                left[str(n.target)] = left.get(str(n.target), 0) + 1
        ops = len(self.kinds.computed)
        return Plan(self.graph, self.constants, steps, ops, left)


def is_row(node: fx.Node) -> bool:
    """Whether a node is a norm or a sum along a row."""
    return is_norm(node) or packet(node) in REDUCTIONS


@dataclass
class _Store(Exception):
    """This node has to be stored."""

    node: fx.Node
    why: str


@dataclass
class _Apart(Exception):
    """These are no guests of another program."""

    guests: set[fx.Node]


@dataclass
class _Leave(Exception):
    """These nodes stay PyTorch's: of what they are made of, everything is stored already."""

    nodes: list[fx.Node]
    why: str


@dataclass(frozen=True)
class _Box:
    """A part of a tensor: how its dimensions were split into variables, and their ranges."""

    splits: tuple[tuple[str, int], ...] = ()
    ranges: tuple[tuple[str, int, int], ...] = ()
    changes: int = 0

    def split(self, split: Split) -> _Box:
        return _Box((*self.splits, (split.name, split.inner)), self.ranges, self.changes + 1)

    def cut(self, cut: Cut) -> list[_Box]:
        """The parts below and from the border, which counts from the start of the range."""
        others = tuple(r for r in self.ranges if r[0] != cut.name)
        start, stop = next(((a, b) for n, a, b in self.ranges if n == cut.name), (0, -1))
        middle = start + cut.border
        parts = (cut.name, middle, stop), (cut.name, start, middle)
        return [_Box(self.splits, (*others, part), self.changes + 1) for part in parts]

    def variable(self, space: Space, name: str, extent: int) -> Affine:
        """A dimension as a variable, or as those that it was split into."""
        inner = dict(self.splits).get(name)
        if inner is not None:
            outer = self.variable(space, f"{name}o", extent // inner)
            return outer * inner + self.variable(space, f"{name}i", inner)
        for known, start, stop in self.ranges:
            if known == name:
                stop = extent if stop < 0 else stop
                return self._new(space, name, stop - start) + start
        return self._new(space, name, extent)

    @staticmethod
    def _new(space: Space, name: str, extent: int) -> Affine:
        if extent == 1:
            return Affine()
        space.extents[name] = extent
        return Affine(0, ((name, 1),))
