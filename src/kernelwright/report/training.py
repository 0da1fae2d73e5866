"""The section about training: one step of each configuration beside eager."""

from __future__ import annotations

from collections.abc import Sequence

from .charts import Bar, Piece, bars
from .figures import Training
from .markup import NONE, Html, joined, number, table, tag
from .rows import TrainingRow

HEAD = ("config", "ms", "speed-up", "GiB", "gradients equal", "losses equal", "error")


def training_section(found: Sequence[Training]) -> list[Html]:
    """For each model: the speed-ups as bars, and a table of the configurations."""
    note = (
        "One step: forward, loss, backward. Gradients of the first step and losses in a row are "
        "compared with eager's, bit for bit, with deterministic algorithms."
    )
    articles = [tag("article", joined(_one(model), "\n")) for model in found]
    return [tag("p", note, class_="note"), *articles]


def _one(model: Training) -> list[Html]:
    lines = []
    for row in model.rows:
        gain = model.speedup(row)
        if gain is not None:
            piece = Piece(0, gain, _colour(row.config), f"{row.config}: {row.ms:.1f} ms")
            lines.append(Bar(row.config, f"{gain:.2f}×", (piece,)))
    chart = bars(lines, f"{model.title}: speed-up of a step", mark=1.0) if lines else Html("")
    rows = [figures(model, row) for row in model.rows]
    notes = [text for row in model.rows for text in _notes(row)]
    return [
        tag("h4", model.title),
        chart,
        table(HEAD, rows),
        *(tag("p", text, class_="note") for text in notes),
    ]


def figures(model: Training, row: TrainingRow) -> list[str]:
    """The cells of a row under HEAD."""
    gain = model.speedup(row)
    return [
        row.config,
        number(row.ms, ".1f"),
        f"{gain:.2f}×" if gain else NONE,
        number(row.gib, ".1f"),
        f"{row.gradients_equal} of {row.gradients}" if not row.failed else NONE,
        f"{row.losses_equal} of {row.losses}" if not row.failed else NONE,
        number(row.error, ".2e"),
    ]


def _colour(config: str) -> str:
    known = ("exact", "fused", "fp8", "compile")
    return next((name for name in known if name in config), "eager")


def _notes(row: TrainingRow) -> list[str]:
    failed = [row.failed] if row.failed else []
    less = row.gradients - row.gradients_repeated if row.config == "eager" else 0
    own = [f"{less} of its gradients differ in a second run"] if less else []
    return [f"{row.config}: {text}" for text in (*failed, *own, *row.problems)]
