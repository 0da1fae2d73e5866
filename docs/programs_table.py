"""What becomes of the blocks of models: a table for the docs, from `docs/programs.json`.

`python docs/programs_table.py` builds a small model of every class, records its blocks and writes
that file; tests/inject/test_any_model.py checks that the same models give eager's bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "programs.json"


@dataclass(frozen=True)
class Row:
    """A class of blocks of a model: how many ops became how many kernels, how many those are of a
    block between two others, and what stays PyTorch's, or why all of it does."""

    model: str
    block: str
    ops: int = 0
    kernels: int = 0
    left: dict[str, int] | None = None
    why: str | None = None
    between: int | None = None


def rows() -> list[Row]:
    return [Row(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def programs(results: Path) -> str:
    """One line a class of blocks."""
    lines = [
        "| model | block | ops → kernels | between two | stays PyTorch's |",
        "|---|---|---|---|---|",
    ]
    before = None
    for row in rows():
        model = "" if row.model == before else f"`{row.model}`"
        before = row.model
        became = f"{row.ops} → {row.kernels}" if row.why is None else "–"
        between = "" if row.between is None else str(row.between)
        stays = row.why or ", ".join(f"{n} {op}" for op, n in (row.left or {}).items())
        lines.append(f"| {model} | `{row.block}` | {became} | {between} | {stays} |")
    return "\n".join(lines)


def recorded(name: str, model: Any, inputs: Any) -> Iterator[Row]:
    """The rows of one model. Its blocks are recorded with the inputs that it gives them."""
    from kernelwright.fuser import planning, recording
    from kernelwright.fuser.block_calls import calls_in_a_row
    from kernelwright.fuser.index import CannotIndex
    from kernelwright.fuser.program import Program
    from kernelwright.fuser.readable import short_counts
    from kernelwright.fuser.rewriting import (
        merge_heads_where_they_lie,
        take_bias_out_of_convolutions,
        take_bias_out_of_products,
    )
    from kernelwright.inject.reuse.recordable import little_to_gain, unknown_constant
    from kernelwright.inject.runtime.cache_copies import can_copy
    from kernelwright.inject.runtime.input_key import WRITES_TO_INPUT

    for kind, calls in sorted(calls_in_a_row(model, inputs).items()):
        block, args, kwargs, _ = calls[0]
        if not can_copy(block, args, kwargs):
            yield Row(name, kind, why=WRITES_TO_INPUT)
            continue
        try:
            made = recording.record(block, args, kwargs)
            if why := unknown_constant(block, made):
                raise recording.CannotRecord(why)
            merge_heads_where_they_lie(made.graph, has_no_mask)
            take_bias_out_of_convolutions(made.graph)
            take_bias_out_of_products(made.graph)
            plan = planning.plan(made)
        except (recording.CannotRecord, CannotIndex) as no:
            yield Row(name, kind, why=str(no))
            continue
        kernels = sum(isinstance(step, Program) for step in plan.steps)
        if why := little_to_gain(plan.ops, kernels):
            yield Row(name, kind, why=why)
            continue
        between = kernels_between(calls, made, plan)
        yield Row(name, kind, plan.ops, kernels, short_counts(plan.left), between=between)


def has_no_mask(attention: Any) -> bool:
    """In `exact`, attention with a mask is given what it was recorded with."""
    return attention.args[3] is None


def kernels_between(calls: Any, made: Any, plan: Any) -> int | None:
    """The kernels of the first block of a class if it runs between two others; None if not fewer.
    The second is recorded as it runs after the first."""
    from kernelwright.backends.torch_internals import pytree
    from kernelwright.fuser import across_blocks, planning, recording
    from kernelwright.fuser.program import Program

    if len(calls) < 2:
        return None
    (_, args, kwargs, result), (block, *given, _) = calls
    after = recording.record(block, *given)
    if len(after.paths) != len(made.paths):  # it is given more than the first
        return None
    known = {id(t): i for i, t in enumerate(pytree.tree_leaves(result))}
    count = made.returns.num_leaves  # with what the block leaves for later ones
    known |= {id(t): count + i for i, t in enumerate(made.given(args, kwargs))}
    sources = tuple(known.get(id(t)) for t in after.given(*given))
    found = planning.plan(after)
    head = across_blocks.head_of(after, found, sources, count)
    own = across_blocks.head_of(made, plan, sources, count)
    if head is None or own is None:
        return None
    rest = across_blocks.rest_of(made, own)
    both = planning.plan(across_blocks.joined(rest, after, head, sources).recording)
    kernels = sum(isinstance(step, Program) for step in both.steps)
    return kernels if kernels < sum(isinstance(step, Program) for step in plan.steps) else None


def record() -> list[Row]:
    """Record every model that the tests have."""
    sys.path.insert(0, str(ROOT / "tests"))
    from inject.small_models import language_models, transformers

    found: list[Row] = []
    # of each class of blocks the second, too: what one does for the next is counted
    for name, (model, inputs) in (*transformers(layers=2), *language_models(layers=2)):
        found += recorded(name, model, inputs)
    return found


if __name__ == "__main__":
    made = [asdict(row) for row in record()]
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
