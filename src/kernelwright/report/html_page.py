"""The report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from .charts import Bar, Piece, bars, legend
from .figures import Device, Model, devices, short
from .markup import NONE, STYLE, Html, joined, number, table, tag
from .ops import ops_section
from .other_kinds import others_section
from .profiles import profiles_section
from .reading import Results
from .rows import ModelRow
from .sentences import exact_sentence, lead, ops_sentence
from .training import training_section
from .videos import videos_section
from .waterfall import waterfall

COLOURS = (
    ("exact", "injected, exact"),
    ("fused", "injected, fused"),
    ("fp8", "injected, fp8"),
    ("compile", "torch.compile alone"),
    ("eager", "eager"),
)


def page(files: Sequence[Results]) -> str:
    """The page: findings first, then each GPU, then the environments."""
    found = devices(files)
    first, *more = lead(found)
    head = joined(
        (
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            tag("title", "kernelwright report"),
            tag("style", Html(STYLE)),
        ),
        "\n",
    )
    top = tag("h1", "kernelwright report"), tag("p", first, class_="lead"), *_paragraphs(more)
    body = joined((tag("header", joined(top)), *map(_device, found), _environment(files)), "\n")
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", body)}\n</html>\n'


def _paragraphs(sentences: Sequence[str]) -> list[Html]:
    return [tag("p", s) for s in sentences]


def _device(device: Device) -> Html:
    pieces: list[str] = [tag("h2", device.name)]
    if device.models:
        pieces += [tag("h3", "Models"), _overview(device.models), legend(COLOURS)]
        pieces.append(tag("div", joined(map(_model, device.models), "\n"), class_="models"))
    if device.training:
        pieces += [tag("h3", "Training"), *training_section(device.training)]
    if device.videos:
        pieces += [tag("h3", "Videos"), *videos_section(device.videos)]
    if device.profiles:
        pieces += [tag("h3", "Profiles"), *profiles_section(device.profiles)]
    if device.ops:
        pieces += [tag("h3", "Ops"), tag("p", ops_sentence(device)), *ops_section(device.ops)]
    if device.exact:
        wrong = any(row.mismatches for row in device.exact)
        sentence = tag("p", exact_sentence(device), class_="bad" if wrong else "good")
        pieces += [tag("h3", "Exactness"), sentence]
    for file in device.files:
        pieces += others_section(file) if file.others else []
    return tag("section", joined(pieces, "\n"))


def _overview(models: Sequence[Model]) -> Html:
    configs = list(dict.fromkeys(r.config for m in models for r in m.rows if r.config != "eager"))
    rows = []
    for model in models:
        eager = model.row("eager")
        cells = [model.title, f"{eager.ms:.1f}" if eager else NONE]
        for config in configs:
            row = model.row(config)
            cells.append(_gain(model, row) if row else NONE)
        rows.append(cells)
    note = "Speed-up of one forward over eager; = means the same bits as eager."
    head = ["model", "eager ms", *configs]
    return joined((tag("p", note, class_="note"), table(head, rows)))


def _gain(model: Model, row: ModelRow) -> Html:
    """The speed-up over eager, and = where the bits are eager's."""
    gain = model.speedup(row)
    same = "=" if row.equal and row.config != "eager" else ""
    return joined((f"{gain:.2f}×" if gain else NONE, tag("span", same, class_="same")))


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
    pieces = [tag("h4", model.title), chart, steps, *notes, _figures(model)]
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


def _environment(files: Sequence[Results]) -> Html:
    head = ["file", "GPU", "driver", "CUDA", "torch", "triton", "Python", "commit", "date"]
    rows = []
    for file in files:
        e = file.environment
        known = (e.device, e.driver, e.cuda, e.torch, e.triton, e.python, short(file), e.date)
        rows.append([file.path.name, *(value or NONE for value in known)])
    commands = [tag("p", tag("code", f.environment.command or NONE)) for f in files]
    inside = joined((tag("summary", "Commands"), *commands))
    pieces = (tag("h2", "Environment"), table(head, rows, words=9), tag("details", inside))
    return tag("section", joined(pieces))
