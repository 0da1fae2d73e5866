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
from .index import Affine, CannotIndex, Cut, Space, Split
from .layouts import in_rows
from .merging import merged
from .node_kinds import NodeKinds
from .program import Program, Store
from .recorded_ops import LINEARS, RMS_NORM
from .recording import Recording
from .views import aten, is_tensor, packet, shape_of

# an operand with this many times fewer elements is computed again wherever it is used
SMALL = 16
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
        self.kept = {n.name for n in self.stored}
        self.memory: frozenset[fx.Node] = frozenset()  # as of the last call of `_programs`
        self.apart: set[fx.Node] = set()  # stored by programs without guests: see `_Group`

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
                elif not self._in_memory(user):
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
            sources = self._sources(n)
            several = sum(prod(shape_of(s)) * SMALL >= prod(shape_of(n)) for s in sources) > 1
            if several or any(self._is_row(m) for m in self._inlined(n)):
                self.stored.add(n)
                sinks = self._sinks()

    @staticmethod
    def _is_row(node: fx.Node) -> bool:
        norm = node.target is RMS_NORM or packet(node) is aten.native_layer_norm
        return norm or packet(node) in REDUCTIONS

    def _inlined(self, node: fx.Node) -> set[fx.Node]:
        """The computed nodes that a node is made of, up to those in memory."""
        found: set[fx.Node] = set()
        pending = [node]
        while pending:
            n = pending.pop()
            if n in found:
                continue
            found.add(n)
            for i in n.all_input_nodes:
                if not self._in_memory(i):
                    pending.append(i)
        return found

    def _in_memory(self, node: fx.Node) -> bool:
        if node in self.kinds.views or node in self.kinds.norms:
            return False
        return node not in self.kinds.computed or node in self.stored

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """What is in memory of all that a node is made of."""
        return {i for n in self._inlined(node) for i in n.all_input_nodes if self._in_memory(i)}

    def to_leave(self, program: Program) -> set[fx.Node]:
        """What stays PyTorch's of a program that has no kernel: its norms and sums, of which few
        orders are known, and everything if it has none."""
        targets = {s.target for s in program.stores}
        nodes = [n for n in self.graph.nodes if n.name in targets]
        inlined: set[fx.Node] = set().union(*(self._inlined(n) for n in nodes))
        computed = inlined & (self.kinds.computed | self.kinds.norms)
        return {n for n in computed if self._is_row(n)} or computed

    def _groups(self) -> list[_Group]:
        """Stored nodes that are one program: of one stage and shape, and made of the same. What is
        one value a row, such as the statistics of a norm, goes with the elements of these rows."""
        groups: list[_Group] = []
        of: dict[fx.Node, _Group] = {}
        for n in self.graph.nodes:
            if n not in self.stored:
                continue
            sources = self._sources(n)
            inlined, direct = self._inlined(n) | sources, sources & self.stored
            shape = self._of_rows(n) or shape_of(n)
            large = {m for m in inlined if prod(shape_of_any(m)) * SMALL >= prod(shape)}
            # query, key and value are parts of one product: one launch, and tables are read once
            large |= {i for s in sources for i in s.all_input_nodes if i.target is LINEARS}
            for group in groups:
                if self.stage[group.nodes[0]] != self.stage[n] or group.shape != shape:
                    continue
                if not (large & group.made_of or direct & set(group.nodes)):
                    continue
                # what it is made of must not wait for this very program
                if any(of[d].waits_for(group) for d in direct - set(group.nodes)):
                    continue
                group.nodes.append(n)
                group.made_of |= large
                break
            else:
                group = _Group([n], large, shape)
                groups.append(group)
            of[n] = group
            group.after += [of[d] for d in direct if of[d] is not group]
        self._delay(groups)
        for group in groups:
            if all(map(self._of_rows, group.nodes)):  # nothing is stored along the rows
                group.shape = shape_of(group.nodes[0])
            group.guests |= {n for n in group.nodes if shape_of(n) != group.shape}
        return groups

    def _delay(self, groups: list[_Group]) -> None:
        """Move what only results of the graph are made of, by ops of PyTorch's, to a later program
        that reads the same: an activation that is computed again for the gradient of a weight to
        the program that computes the activation's own gradient."""
        for early in list(groups):
            if not all(map(self._may_wait, early.nodes)):
                continue
            sources = set().union(*map(self._sources, early.nodes))
            size = prod(early.shape)
            large = {s for s in sources if prod(shape_of_any(s)) * SMALL >= size}
            for late in groups:
                if late.shape != early.shape or late is early:
                    continue
                if self.stage[late.nodes[0]] <= self.stage[early.nodes[0]]:
                    continue
                if large <= set().union(*map(self._sources, late.nodes)):
                    late.nodes += early.nodes
                    late.guests.update(early.nodes)
                    late.made_of |= early.made_of
                    late.after += early.after
                    groups.remove(early)
                    break

    def _may_wait(self, node: fx.Node) -> bool:
        """Whether nothing that the graph computes is made of what PyTorch's ops make of a node."""
        readers = self._readers(node)
        return node not in self.apart and all(
            r in self.kinds.leaves and {n.op for n in self._readers(r)} == {"output"}
            for r in readers
        )

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        """What reads a node, or a view of it."""
        found: set[fx.Node] = set()
        for user in node.users:
            found |= self._readers(user) if user in self.kinds.views else {user}
        return found

    def _of_rows(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of the rows of which a node has one value each, or None."""
        shape = shape_of(node)
        if node in self.apart or shape[-1:] != (1,):
            return None
        found = {
            shape_of(i)
            for n in self._inlined(node)
            if packet(n) in REDUCTIONS
            for i in n.all_input_nodes
        }
        if len(found) != 1:
            return None
        (rows,) = found
        return rows if rows[:-1] == shape[:-1] and rows[-1] >= SMALL else None

    def _programs(self, is_good: Callable[[Program], bool]) -> list[Program]:
        self.memory = frozenset(n for n in self.graph.nodes if self._in_memory(n))
        made: list[Program] = []
        for group in self._groups():
            try:
                built = self._built(group)
            except _Store as no:
                raise _Apart(group.guests) if group.guests else no from None
            if group.guests and not (len(built) == 1 and is_good(built[0])):
                raise _Apart(group.guests)
            made += built
        return made

    def _built(self, group: _Group) -> list[Program]:
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

    def _program(self, group: _Group, box: _Box) -> Program:
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
        inlined = set().union(*map(self._inlined, group)) & self.kinds.computed - self.stored
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


@dataclass(eq=False)
class _Group:
    """Stored nodes of one program, what they are made of, and the programs that it needs first.
    `guests` are there to share what is loaded: they may have a program of their own."""

    nodes: list[fx.Node]
    made_of: set[fx.Node]
    shape: tuple[int, ...]  # of what it stores, or of the rows that have one value each
    after: list[_Group] = field(default_factory=list)
    guests: set[fx.Node] = field(default_factory=set)

    def waits_for(self, other: _Group) -> bool:
        pending, seen = [self], set()
        while pending:
            group = pending.pop()
            if group is other:
                return True
            if group not in seen:
                seen.add(group)
                pending += group.after
        return False


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


def shape_of_any(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node) if is_tensor(node) else ()
