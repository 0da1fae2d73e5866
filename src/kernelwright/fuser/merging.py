"""Programs that read what another one writes, element by element, taken into that one.

Stores of one shape share a program by planning. A part of a concatenation has the shape of what it
is made of, but is a program of its own, since a tensor with several parts is written by several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .expression import Choice, Expression, Load, Row, Step, rewritten, rounded, walk
from .index import Affine
from .lowering import moved_index
from .program import Program, Store

# a program that makes a tensor of at most so many loads, such as the sum of what a layer and its
# adapter give, may compute another element of it again
COMPUTED_AGAIN = 2


def merged(
    programs: list[Program], stage: Mapping[str, int], is_good: Callable[[Program], bool]
) -> list[Program]:
    """The programs, fewer where one can be taken into another and the result `is_good`. `stage` has
    the number of PyTorch's ops before each stored tensor: between programs of one stage there are
    none."""
    found = list(programs)
    i = 0
    while i < len(found):
        reader = found[i]
        for writer in found:
            if writer is reader or not _are_of_one_stage(writer, reader, stage):
                continue
            both = _together(writer, reader)
            if both is None or _waits(found, writer, reader) or not is_good(both):
                continue
            found[found.index(writer)] = both
            found.remove(reader)
            i = 0
            break
        else:
            i += 1
    return found


def _are_of_one_stage(writer: Program, reader: Program, stage: Mapping[str, int]) -> bool:
    return stage[writer.stores[0].target] == stage[reader.stores[0].target]


def _together(writer: Program, reader: Program) -> Program | None:
    """Both in one, if the second reads of the first."""
    written = {s.target: s for s in writer.stores}
    loads = [e for e in walk(*(s.value for s in reader.stores)) if isinstance(e, Load)]
    read = [e for e in loads if e.source in written]
    # a tensor of several parts is written by several programs
    if not read or any(s.target in written for s in reader.stores):
        return None
    if writer.extents == reader.extents and all(e.index == written[e.source].index for e in read):
        stores, values = written, {e: written[e.source].value for e in read}
    else:
        found = _as_read(writer, written, reader, read)
        if found is None:
            return None
        stores, values = found
    change = rewritten(lambda load: values.get(load, load))
    changed = (replace(s, value=change(s.value)) for s in reader.stores)
    return Program(reader.extents, (*stores.values(), *changed))


def _as_read(
    writer: Program, written: Mapping[str, Store], reader: Program, read: list[Load]
) -> tuple[dict[str, Store], dict[Load, Expression]] | None:
    """What the writer stores with the variables of the reader, such as heads and what is in a head
    where the writer has a width, and what it is that the reader loads of it. Other elements than
    its own, such as the other one of a pair, are computed again. None if the reader does not read
    each element at least once, or if the writer has more to it than a sum of two tensors."""
    parts = list(walk(*(s.value for s in writer.stores)))
    if any(isinstance(e, Choice | Row) for e in parts):
        return None  # these name variables
    if sum(isinstance(e, Load) for e in parts) > COMPUTED_AGAIN:
        return None
    extents = dict(reader.extents)
    found = (_places(written[e.source], e) for e in read)
    places = next((p for p in found if p is not None and _counts(p, writer, extents)), None)
    if places is None:
        return None
    stores = {
        s.target: replace(s, index=_at(s.index, places), value=_moved(s.value, places))
        for s in writer.stores
    }
    values: dict[Load, Expression] = {}
    for e in read:
        store = written[e.source]
        if e.index == stores[e.source].index:
            values[e] = stores[e.source].value
            continue
        elsewhere = _places(store, e)
        if elsewhere is None or store.value.dtype != store.dtype:
            return None
        # as it was stored, whatever the tier
        values[e] = Step(rounded, (_moved(store.value, elsewhere),), (), store.dtype)
    return stores, values


def _places(store: Store, load: Load) -> dict[str, Affine] | None:
    """The values of the writer's variables with which it stores what is loaded; None if that is not
    a matter of one variable for each dimension."""
    places: dict[str, Affine] = {}
    for mine, theirs in zip(store.index, load.index, strict=True):
        if mine.terms:
            ((name, factor), *more) = mine.terms
            if more or factor != 1 or mine.constant or name in places:
                return None
            places[name] = theirs
        elif mine != theirs:
            return None
    return places


def _counts(places: Mapping[str, Affine], writer: Program, extents: Mapping[str, int]) -> bool:
    """Whether variables of these extents take each element of the writer once."""
    used = [name for place in places.values() for name, _ in place.terms]
    if sorted(used) != sorted(extents):
        return False
    sizes = {}
    for mine, place in places.items():
        sizes[mine] = 1
        for name, factor in sorted(place.terms, key=lambda term: term[1]):
            if factor != sizes[mine]:
                return False
            sizes[mine] *= extents[name]
        if place.constant:
            return False
    return sizes == dict(writer.extents)


def _at(index: tuple[Affine, ...], places: Mapping[str, Affine]) -> tuple[Affine, ...]:
    return tuple(moved_index(i, places) for i in index)


def _moved(value: Expression, places: Mapping[str, Affine]) -> Expression:
    """An expression without rows at these values of its variables."""
    moved: Expression = rewritten(lambda e: replace(e, index=_at(e.index, places)))(value)
    return moved


def _waits(programs: list[Program], writer: Program, reader: Program) -> bool:
    """Whether something else that the reader loads is made of what the writer stores, or another
    program stores a part of what the reader loads of the writer."""
    makers: dict[str, list[Program]] = {}
    for program in programs:
        for s in program.stores:
            makers.setdefault(s.target, []).append(program)
    own = {s.target for s in writer.stores}
    if any(len(makers[name]) > 1 for name in own & set(reader.loads)):
        return True
    pending = [name for name in reader.loads if name not in own]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in own:
            return True
        if name not in seen:
            seen.add(name)
            pending += [n for p in makers.get(name, ()) for n in p.loads]
    return False
