"""The figures that README.md shows, made from the code and from `results/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import catalog

SHOWN = {
    "compile": "torch.compile",
    "exact": "exact",
    "exact+graphs": "exact, graphs",
    "fused+graphs": "fused, graphs",
    "exact+compile": "exact, compile",
}


def update(readme: Path, results: Path) -> None:
    """Put today's tables between the markers of README.md."""
    sections: dict[str, Callable[[], str]] = {
        "ops": lambda: catalog.markdown(catalog.entries()),
        "models": lambda: models(results / "h200" / "models"),
    }
    text = readme.read_text()
    for name, make in sections.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    readme.write_text(text)


def models(folder: Path) -> str:
    """One line a model: milliseconds of one forward, and how much faster than eager."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = [
        f"| one forward, ms | eager | {' | '.join(SHOWN.values())} |",
        f"|---|---|{'---|' * len(SHOWN)}",
    ]
    by_speed = sorted(files, key=lambda f: -_speed(f["rows"]))
    lines += [_line(file["rows"]) for file in by_speed]
    environment = files[0]["environment"]
    commits = sorted({file["environment"]["commit"][:7] for file in files})
    note = (
        f"{environment['gpu']}, torch {environment['torch']}, triton {environment['triton']}, "
        f"random weights, commit {', '.join(commits)}; = means `torch.equal` to eager."
    )
    return "\n".join([*lines, "", note])


def _line(rows: list[dict[str, Any]]) -> str:
    times = {row["config"]: row for row in rows if "ms" in row}
    eager = times["eager"]["ms"]
    cells = []
    for config in SHOWN:
        row = times.get(config)
        if row is None:
            cells.append("–")
            continue
        same = " =" if row["equal"] else ""
        cells.append(f"{row['ms']:.1f} ({eager / row['ms']:.2f}×){same}")
    return f"| {_title(rows[0])} | {eager:.1f} | {' | '.join(cells)} |"


def _title(row: dict[str, Any]) -> str:
    sizes = row["sizes"]
    picture = f"{sizes['width']}×{sizes['height']}" if "height" in sizes else ""
    frames = f"{sizes['frames']}f" if "frames" in sizes else ""
    tokens = f"{sizes['tokens']} tokens" if "tokens" in sizes else ""
    batch = f"batch {sizes['batch']}" if sizes.get("batch", 1) > 1 else ""
    return " ".join(p for p in (f"`{row['model']}`", frames, picture, tokens, batch) if p)


def _speed(rows: list[dict[str, Any]]) -> float:
    times = {row["config"]: row["ms"] for row in rows if "ms" in row}
    return times["eager"] / times["exact+graphs"]
