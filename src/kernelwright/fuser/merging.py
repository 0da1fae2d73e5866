"""Programs that read what another one of the same extents writes, taken into that one.

Stores of one shape share a program by planning. A part of a concatenation has the shape of what it
is made of, but is a program of its own, since a tensor with several parts is written by several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .expression import Expression, Load, rewritten, walk
from .program import Program


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
            if writer is reader or not _fit(writer, reader, stage):
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


def _fit(writer: Program, reader: Program, stage: Mapping[str, int]) -> bool:
    if writer.extents != reader.extents:
        return False
    return stage[writer.stores[0].target] == stage[reader.stores[0].target]


def _together(writer: Program, reader: Program) -> Program | None:
    """Both in one, if the second reads of the first, and only what the same thread writes."""
    written = {s.target: s for s in writer.stores}
    loads = [e for e in walk(*(s.value for s in reader.stores)) if isinstance(e, Load)]
    read = [e for e in loads if e.source in written]
    if not read or any(e.index != written[e.source].index for e in read):
        return None
    # a tensor of several parts is written by several programs
    if any(s.target in written for s in reader.stores):
        return None

    def value(load: Load) -> Expression:
        return written[load.source].value if load.source in written else load

    change = rewritten(value)
    stores = (replace(s, value=change(s.value)) for s in reader.stores)
    return Program(writer.extents, (*writer.stores, *stores))


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
