"""What `kernelwright ops` shows: every declared op, read from the registry."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import ops
from .close_names import suggestion
from .docstring_lines import wrapped
from .ops import checks
from .ops.op import Composite, Op, registry

COLUMNS = ("op", "computes", "backends", "exact", "dtypes")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Entry:
    """One op, as shown to the user."""

    name: str
    formula: str
    signature: str
    doc: str
    backends: tuple[str, ...]
    exact: tuple[str, ...]
    dtypes: tuple[str, ...]
    inplace: bool
    cases: tuple[str, ...]
    large_cases: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            self.formula,
            ", ".join(self.backends),
            ", ".join(self.exact) or "–",
            ", ".join(SHORT[d] for d in self.dtypes),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def entries() -> list[Entry]:
    """Every op, by name."""
    return [_entry(op) for op in registry().values()]


def entry(name: str) -> Entry:
    """One op; a KeyError that suggests the nearest names if there is none."""
    known = registry()
    if name not in known:
        raise KeyError(f"there is no op {name!r}; {suggestion(name, known, 'kernelwright ops')}")
    return _entry(known[name])


def table(listed: list[Entry]) -> RenderableType:
    """The ops as a table for the terminal."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for e in listed:
        name, formula, backends, exact, dtypes = e.cells()
        facts = Text(f"{backends} · exact: {exact} · {dtypes}", style="dim")
        grid.add_row(Text(name, style="bold"), Text(formula).append("\n").append_text(facts))
    return grid


def markdown(listed: list[Entry]) -> str:
    """The same table in Markdown, for docs/ops/index.md and the Hub package's card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for e in listed:
        name, formula, *rest = (c.replace("|", "\\|") for c in e.cells())
        lines.append("| " + " | ".join((f"`{name}`", formula, *rest)) + " |")
    return "\n".join(lines)


def fill_section(text: str, name: str, content: str) -> str:
    """Markdown with `content` between its markers `<!-- name:begin -->` and `<!-- name:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def page(e: Entry) -> RenderableType:
    """One op in full: signature, docstring, exact modes, and its cases."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("backends", Text(", ".join(e.backends)))
    facts.add_row("dtypes", Text(", ".join(e.dtypes)))
    facts.add_row("exact", Text(_exact_text(e)))
    facts.add_row("in place", "inplace=True" if e.inplace else "no")
    facts.add_row("cases", Text(", ".join(e.cases)))
    facts.add_row("timed on", Text(", ".join(e.large_cases) or "–"))
    return Group(Text(e.signature, style="bold"), "", _Documentation(e.doc), "", facts)


@dataclass(frozen=True)
class _Documentation:
    """A docstring in lines that fit the terminal."""

    doc: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(wrapped(self.doc, options.max_width))


def _exact_text(e: Entry) -> str:
    if not e.exact:
        return "none"
    asks = " or ".join(f'exact="{name}"' for name in e.exact)
    if "cuda" not in e.backends:
        return f"{asks}: that eager chain itself"
    return f"{asks}: torch.equal to that eager chain (cuda backend; on the CPU the chain itself)"


def public(op: Op | Composite) -> Callable[..., Any]:
    """The public function of an op: ours, or that of the package that declares it."""
    if isinstance(op, Op) and not hasattr(ops, op.name):
        return getattr(sys.modules[op.check.__module__], op.name, op.reference)
    return getattr(ops, op.name, op.reference)


def _entry(op: Op | Composite) -> Entry:
    function = public(op)
    return Entry(
        name=op.name,
        formula=op.formula,
        signature=f"{op.name}{_signature(function)}",
        doc=inspect.getdoc(function) or "",
        backends=op.backends,
        exact=tuple(op.exact),
        dtypes=tuple(n for n in map(_name, checks.DTYPES) if n in SHORT),
        inplace="inplace" in inspect.signature(function).parameters,
        cases=tuple(c.name for c in op.cases if not c.large),
        large_cases=tuple(c.name for c in op.cases if c.large),
    )


def _signature(function: Callable[..., Any]) -> str:
    """The parameters without annotations; the docstring explains the types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
