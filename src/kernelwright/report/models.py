"""The section about models: for each family its goal, its peers, and a table of speed-ups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..models import family_of
from .charts import Bar, Piece, bars, legend
from .figures import Model
from .goals import GOALS
from .markup import NONE, Html, joined, number, table, tag
from .rows import ModelRow
from .waterfall import waterfall

COLOURS = (
    ("exact", "injected, exact"),
    ("fused", "injected, fused"),
    ("fp8", "injected, fp8"),
    ("compile", "torch.compile alone"),
    ("eager", "eager"),
)
# a narrow screen shows the first of these without scrolling
FIRST = ("exact+graphs", "exact", "compile", "compile+graphs", "fused+graphs", "fp8+graphs")
NOTE = (
    "Speed-up of one forward over eager, which is the model without our kernels; = means the same "
    "bits as eager. Floor: milliseconds of the GEMMs and attention alone, which no fusing saves. "
    "Goal: the speed-up that exact is to reach."
)
LOOP_NOTE = (
    "Speed-up of a whole denoising loop over eager; = means the same bits as the loop without "
    "injection that has the same cache. First Block Cache skips steps: its result is not eager's."
)


def models_section(models: Sequence[Model]) -> list[Html]:
    """A table for each family, and folded, the charts of its models."""
    families: dict[str, list[Model]] = {}
    for model in models:
        families.setdefault(family_of(model.rows[0].workload.model), []).append(model)
    pieces = [tag("p", NOTE, class_="note")]
    for family, found in families.items():
        charts = tag("div", joined(map(_model, found), "\n"), class_="models")
        folded = joined((tag("summary", "Charts and figures of each model"), _legend(), charts))
        pieces += [tag("h4", f"{family} models"), *_goal(found), _overview(found)]
        pieces.append(tag("details", folded))
    return pieces


def loops_section(loops: Sequence[Model]) -> list[Html]:
    """Denoising loops, with and without First Block Cache."""
    configs = _configs(loops)
    rows = [
        [m.title, _ms(m, "eager"), *(_gain(m, m.row(config)) for config in configs)] for m in loops
    ]
    return [tag("p", LOOP_NOTE, class_="note"), table(["loop", "eager ms", *configs], rows)]


def _goal(models: Sequence[Model]) -> list[Html]:
    """What the family is to reach, how much of it does, and whom it is compared with."""
    pairs = [(m, m.best_exact, m.best_compiled) for m in models]
    timed = [(m, a.ms, b.ms) for m, a, b in pairs if a and b and a.ms and b.ms]
    text = "Goal: the bits of eager, and faster than torch.compile at its best"
    if timed:
        text += f"; {sum(a < b for _, a, b in timed)} of {len(timed)} that were timed beside it are"
    if slower := [m.title for m, a, b in timed if a >= b]:
        text += f", not {', '.join(slower)}"
    goals = [(m.gain, GOALS[m.title].exact) for m in models if m.title in GOALS]
    if goals:
        # as they are read: to two places
        reached = sum(round(gain, 2) >= goal for gain, goal in goals)
        text += f". Of the goals set for single models {reached} of {len(goals)} are reached"
    peers = [c for c in _configs(models) if c.startswith(("compile", "torchao"))]
    named = ", ".join(_peer(config) for config in peers) or "none was timed"
    return [tag("p", f"{text}."), tag("p", f"Peers: {named}.")]


def _peer(config: str) -> str:
    """`torchao+compile+graphs` as words.

    >>> _peer("torchao+compile+graphs")
    'torchao torch.compile as a CUDA graph'
    """
    words = {
        "compile": "torch.compile",
        "graphs": "as a CUDA graph",
        "autotune": "max-autotune",
        "torchao": "torchao",
    }
    return " ".join(words.get(word, word) for word in config.split("+"))


def _configs(models: Iterable[Model]) -> list[str]:
    """All but eager, in the order of FIRST, then by tier."""
    found = dict.fromkeys(r.config for m in models for r in m.rows if r.config != "eager")
    tiers = ("compile", "cache", "exact", "fused", "fp8", "torchao")
    ranks = {config: rank for rank, config in enumerate(FIRST)}
    return sorted(found, key=lambda c: (ranks.get(c, len(ranks)), tiers.index(c.split("+")[0]), c))


def _overview(models: Sequence[Model]) -> Html:
    first, *others = _configs(models) or [FIRST[0]]
    rows = [
        [
            model.title,
            _ms(model, "eager"),
            _gain(model, model.row(first)),
            f"{GOALS[model.title].exact:.2f}×" if model.title in GOALS else NONE,
            *(_gain(model, model.row(config)) for config in others),
            number(model.floor, ".1f"),
        ]
        for model in models
    ]
    return table(["model", "eager ms", first, "goal", *others, "floor ms"], rows)


def _ms(model: Model, config: str) -> str:
    row = model.row(config)
    return number(row.ms if row else None, ".1f")


def _gain(model: Model, row: ModelRow | None) -> Html:
    """The speed-up over eager, and = where the bits are eager's. The place of = is kept where there
    is none, so that figures stay below each other."""
    gain = row and model.speedup(row)
    same = "=" if row and row.equal and row.config != "eager" else ""
    return joined((f"{gain:.2f}×" if gain else NONE, tag("span", same, class_="same")))


def _legend() -> Html:
    return legend(COLOURS)


def _model(model: Model) -> Html:
    lines = []
    for row in model.rows:
        gain = model.speedup(row)
        if gain is None:
            continue
        piece = Piece(0, gain, _colour(row.config), f"{row.config}: {row.ms:.1f} ms")
        lines.append(Bar(row.config, _gain(model, row), (piece,)))
    chart = bars(lines, f"{model.title}: speed-up over eager", mark=1.0) if lines else Html("")
    notes = [tag("p", text, class_="note") for row in model.rows for text in _notes(row)]
    steps = waterfall(model.title, model.steps) if model.steps else Html("")
    pieces = [tag("h5", model.title, class_="title"), chart, steps, *notes, _figures(model)]
    return tag("article", joined(pieces, "\n"))


def _colour(config: str) -> str:
    return next(colour for colour, _ in COLOURS if colour in config or colour == "eager")


def _figures(model: Model) -> Html:
    head = ["config", "bits", "ms", "first s", "cold s", "warm s", "peak GiB", "error", "replaced"]
    rows = [
        [
            row.config,
            _bits(row),
            number(row.ms, ".1f"),
            number(row.first_s, ".2f"),
            number(row.cold_s, ".2f"),
            number(row.warm_s, ".2f"),
            number(row.peak_gib, ".1f"),
            number(row.error, ".2e"),
            number(row.replaced, ""),
        ]
        for row in model.rows
    ]
    inside = [tag("summary", "Figures"), table(head, rows, words=2)]
    sites = next((row for row in (model.after, *model.rows) if row and row.sites), None)
    if sites:
        listed = ", ".join(_site(name, fates) for name, fates in sites.sites.items())
        inside.append(tag("p", f"Sites, {sites.config}: {listed}.", class_="note"))
    return tag("details", joined(inside))


def _bits(row: ModelRow) -> str:
    if row.failed:
        return "not here" if row.unavailable else "failed"
    return "equal" if row.equal else "differ"


def _site(name: str, fates: dict[str, int]) -> str:
    return f"{name} ({', '.join(f'{count} {fate}' for fate, count in fates.items())})"


def _notes(row: ModelRow) -> list[str]:
    """Failures and problems of a row."""
    without = [g for g in row.graphs if "without" in g]
    failed = [row.failed] if row.failed else []
    return [f"{row.config}: {text}" for text in (*failed, *row.problems, *without)]
