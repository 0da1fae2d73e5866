"""`make docs`: fills the tables of README.md and docs/ and draws the picture; as a hook of mkdocs
it adds the pages that are made, not written: the front page, the rules, the API reference, and one
page per op."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compatibility_table
import figures
import goals
import programs_table
from fusion import picture

import kernelwright as kw
from kernelwright import catalog
from kernelwright.ops.op import registry
from kernelwright.report import readme_tables
from kernelwright.report.reading import read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PICTURE = "docs/pictures/speedups.svg"
TABLES: dict[str, Callable[[Path], str]] = {
    "op-times": figures.op_times,
    "exactness": figures.exactness,
    "first-results": figures.first_results,
    "decoding": figures.decoding,
    "generations": figures.generations,
    "training": figures.training,
    "goals": goals.goals,
    "numerics": goals.numerics,
    "splits": goals.splits,
    "left": goals.left,
    "without-recipes": goals.without_recipes,
    "fp8-memory": goals.fp8_memory,
    "fp8-attention": figures.fp8_attention,
    "hub-calls": figures.hub_calls,
    "programs": programs_table.programs,
    "compatibility": compatibility_table.compatibility,
    "compatibility-short": compatibility_table.in_short,
}


def written() -> list[Path]:
    """The pages that are written by hand and may hold tables."""
    skill = ROOT / "src" / "kernelwright" / "skill"
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(skill.rglob("*.md")),
    ]


def fill(root: Path = ROOT) -> None:
    """Put today's tables into the pages under `root`, and draw the picture there."""
    for path in (root / page.relative_to(ROOT) for page in written()):
        readme_tables.update(path, RESULTS)
        text = path.read_text(encoding="utf-8")
        for name, make in TABLES.items():
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n{make(RESULTS / 'h200')}\n{end}{rest.split(end)[1]}"
        path.write_text(text, encoding="utf-8")
    (root / PICTURE).write_text(figures.speedups(RESULTS / "h200"), encoding="utf-8")


def pages() -> Iterator[tuple[str, str]]:
    """The pages that are made: where they stand below docs/, and their text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    yield "index.md", _moved(readme)
    rules = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    yield "contributing.md", _moved(rules)
    yield "api.md", _api_page()
    files = sorted((RESULTS / "h200").glob("ops*.json"))
    rows = [row for file in read(files) for row in file.ops]
    for entry in catalog.entries():
        measured = [row for row in rows if row.op == entry.name]
        times = figures.op_table(measured, named=False) if measured else ""
        yield f"ops/{entry.name}.md", _op_page(entry, times)


def _api_page() -> str:
    """The API reference: mkdocstrings fills in what each object's docstring says."""
    injection = {name: getattr(kw, name) for name in ("inject", "restore", "injected", "inspect")}
    backends = {name: getattr(kw, name) for name in ("use_backend", "registry")}
    functions = {name: op for name in registry() if (op := getattr(kw, name, None))}
    sections = {
        "Injection": {f"kw.{name}": found for name, found in (*injection.items(), _REPORT)},
        "Hugging Face Hub": {f"kw.hub.{name}": getattr(kw.hub, name) for name in kw.hub.__all__},
        "Ops": {f"kw.{name}": found for name, found in (*functions.items(), *backends.items())},
    }
    lines = ["# API reference", "", "`import kernelwright as kw`. Generated from the docstrings."]
    for title, objects in sections.items():
        lines += ["", f"## {title}"]
        for name, found in objects.items():
            lines += ["", f"::: {found.__module__}.{found.__qualname__}", "    options:"]
            lines += [f"      heading: {name}", f"      toc_label: {name}"]
    return "\n".join(lines) + "\n"


_REPORT = ("Report", kw.Report)


def _moved(text: str) -> str:
    """A page of the root, with its links as they are from within docs/."""
    text = re.sub(r"(\]\(|src=\")docs/", r"\1", text)
    return text.replace("](CONTRIBUTING.md", "](contributing.md").replace(
        "](README.md", "](index.md"
    )


def _op_page(entry: catalog.Entry, times: str) -> str:
    said, arguments, example = _parts(entry.doc)
    lines = [f"# {entry.name}", "", f"{entry.formula}", "", f"```python\n{entry.signature}\n```"]
    lines += ["", f"`{said[0]}`", *said[1:], "", "## Arguments", ""]
    lines += [f"- `{name}`: {about}" for name, about in arguments]
    if example:
        lines += ["", "```pycon", *example, "```"]
    lines += ["", "## What it fuses", "", str(picture(registry()[entry.name])), ""]
    lines += [
        "Each line on the left is a kernel of its own, with the bytes it reads and writes, in "
        "bfloat16.",
        "",
        "## Backends",
        "",
        f"- backends: {', '.join(entry.backends)}",
        f"- dtypes: {', '.join(entry.dtypes)}",
        f"- exact: {', '.join(entry.exact) or 'none'}",
        f"- in place: {'`inplace=True`' if entry.inplace else 'no'}",
        f"- shapes it is timed on: {', '.join(entry.large_cases) or 'none'}",
    ]
    if times:
        lines += ["", "## Measured", "", "GPU microseconds, see [performance](../performance.md):"]
        lines += ["", times]
    return "\n".join(lines) + "\n"


def _parts(doc: str) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """A docstring as what it says, its arguments, and its example."""
    text, _, example = doc.partition(">>>")
    text, _, given = text.partition("Args:")
    arguments: list[tuple[str, str]] = []
    rest = []
    for line in given.splitlines():
        if line.startswith("        ") and arguments:
            name, about = arguments[-1]
            arguments[-1] = name, f"{about} {line.strip()}"
        elif line.startswith("    "):
            name, _, about = line.strip().partition(": ")
            arguments.append((name, about))
        elif line.strip():
            rest.append(line)
    said = [line.strip() for line in text.strip().splitlines()] + rest
    return said, arguments, f">>>{example}".splitlines() if example else []


# the hook


def on_config(config: Any) -> Any:
    """List the pages of the ops below that of all of them."""
    (listed,) = (entry["Ops"] for entry in config.nav if "Ops" in entry)
    listed += [f"ops/{name}.md" for name in registry()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for place, text in pages():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files above docs/ lead to the pages made of them, names of ops to theirs."""
    if page.file.src_uri != "ops/index.md":
        moved = markdown.replace("](../README.md", "](index.md")
        return moved.replace("](../CONTRIBUTING.md", "](contributing.md")
    for name in registry():
        markdown = markdown.replace(f"| `{name}` |", f"| [`{name}`]({name}.md) |")
    return markdown


if __name__ == "__main__":
    fill()
