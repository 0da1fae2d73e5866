"""The tables and figures of README.md and docs/, made from the declared ops and from `results/`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import catalog
from ..ops import ways
from .figures import Model, Video, devices
from .goals import GOALS
from .reading import Results, read
from .rows import RANDOM, ModelRow
from .videos import psnr

SHOWN = {
    "compile": "torch.compile",
    "compile+graphs": "torch.compile, graphs",
    "exact": "exact",
    "exact+graphs": "exact, graphs",
    "fused+graphs": "fused, graphs",
    "fused+fa4+graphs": "fused, fa4, graphs",
    "fp8+graphs": "fp8, graphs",
    "exact+compile": "exact, compile",
}

# the columns of README.md, and the model that its first lines quote
MAIN = ("compile", "compile+graphs", "exact+graphs", "fused+graphs", "fp8+graphs")
LEAD = "ltx-video"
LANGUAGE_MODELS = ("falcon", "llama", "mistral", "qwen")


def update(readme: Path, results: Path) -> None:
    """Write the tables between the markers of README.md."""
    sections: dict[str, Callable[[], str]] = {
        "ops": lambda: catalog.markdown(catalog.entries()),
        "lead": lambda: lead(results / "h200" / "models"),
        "main": lambda: main(results / "h200" / "models"),
        "fp8-error": lambda: fp8_error(results / "h200" / "models"),
        "fp8": lambda: fp8(results / "h200"),
        "slower": lambda: slower(results / "h200"),
        "models": lambda: models(results / "h200" / "models"),
        "full-depth": lambda: models(results / "h200" / "full-depth"),
        "few-layers": lambda: models(results / "h200" / "few-layers"),
        "videos": lambda: videos(results / "h200" / "videos"),
        "pytorch": lambda: pytorch(results),
    }
    text = readme.read_text()
    for name, make in sections.items():
        if f"<!-- {name}:begin -->" in text:
            text = catalog.fill_section(text, name, make())
    readme.write_text(text)


def models(folder: Path) -> str:
    """One line a model: milliseconds of one forward, and how much faster than eager."""
    files = read([folder])
    (device,) = devices(files)
    found = _one_depth(device.models)
    shown = [c for c in SHOWN if any(model.row(c) for model in found)]
    lines = [
        f"| one forward, ms | eager | {' | '.join(SHOWN[c] for c in shown)} |",
        f"|---|---|{'---|' * len(shown)}",
    ]
    lines += [_model(model, shown) for model in sorted(found, key=_graphs_gain, reverse=True)]
    return "\n".join([*lines, "", f"{_about(files, RANDOM)}; = means `torch.equal` to eager."])


def main(folder: Path) -> str:
    """The table of README.md: one size of each model, and the columns to choose from."""
    files, found = one_size(folder)
    shown = [c for c in MAIN if any(model.row(c) for model in found)]
    lines = [
        f"| ms per forward | eager | {' | '.join(SHOWN[c] for c in shown)} |",
        f"|---|---|{'---|' * len(shown)}",
    ]
    # a time, its speed-up and its sign stay on one line
    lines += [re.sub(r" ([(=])", "\N{NO-BREAK SPACE}\\1", _model(model, shown)) for model in found]
    return "\n".join([*lines, "", f"{_about(files, RANDOM)}; = is bit-identical to eager."])


def lead(folder: Path) -> str:
    """What README.md says first: medians over the models that were measured in every way, and
    LTX-Video."""
    _, found = one_size(folder)
    ways = {
        "compile": "torch.compile",
        "compile+graphs": "torch.compile with CUDA graphs",
        "exact+graphs": "**`exact` with CUDA graphs, bit-identical**",
        "fp8+graphs": "`fp8` with CUDA graphs",
    }
    first = found[0]
    ways = {config: what for config, what in ways.items() if first.row(config)}
    complete = [model for model in found if all(map(model.row, ways))]
    size = first.rows[0].workload.size
    head = f"median of {len(complete)} models"
    lines = [f"| speed-up over eager | {head} | LTX-Video {size} |", "|---|---|---|"]
    for config, what in ways.items():
        gains = [model.speedup(row) or 0.0 for model in complete if (row := model.row(config))]
        lines.append(f"| {what} | {statistics.median(gains):.2f}× | {gains[0]:.2f}× |")
    return "\n".join(lines)


def fp8_error(folder: Path) -> str:
    """The error of fp8 against a float32 run, beside eager's: diffusion models, language models."""
    _, found = one_size(folder)
    said = []
    for what, language in (("diffusion models", False), ("language models", True)):
        pairs = [
            (eager.error, fp8.error)
            for model in found
            if _is_language(model) is language
            and (fp8 := model.row("fp8+graphs"))
            and (eager := model.row("eager"))
            and fp8.error
            and eager.error
        ]
        if pairs:
            own, theirs = (_range(values) for values in zip(*pairs, strict=True))
            said.append(f"{theirs} in {what} ({len(pairs)} measured), where eager is off by {own}")
    return f"Error of `fp8` against a float32 run of the same random weights: {'; '.join(said)}."


def fp8(folder: Path) -> str:
    """What the tier fp8 gains and costs: beside torchao, and torch.compile as the control, which
    changes rounding alone. Runs beside torchao, in a folder of their own, stand for the others."""
    lines = [
        "| `fp8` with CUDA graphs | speed-up | of torchao | error of eager | of torch.compile "
        "| of `fp8` | of torchao | PSNR of torch.compile | of `fp8` | of torchao | GPU memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    _, found = one_size(folder / "models")
    apart = folder.with_name(f"{folder.name}-fp8")
    runs = any(apart.glob("*.json"))
    beside = {m.title: m for m in _models_of(apart)[1]} if runs else {}
    for model in found:
        model = beside.get(model.title, model)
        eager, ours, control = map(model.row, ("eager", "fp8+graphs", "compile"))
        peers = [row for row in model.rows if row.config.startswith("torchao") and row.ms]
        if eager is None or ours is None:
            continue
        cells = [_times(model.speedup(ours))]
        cells.append(_times(max((model.speedup(row) or 0.0 for row in peers), default=None)))
        peer = peers[0] if peers else None
        cells += [_share(row.error if row else None) for row in (eager, control, ours, peer)]
        cells += [_decibels(row.psnr if row else None) for row in (control, ours, peer)]
        held, whole = ours.steady_reserved_gib, eager.steady_reserved_gib
        cells.append(_times(held / whole if held and whole else None))
        lines.append(f"| {_name(model)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _decibels(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} dB"


def slower(folder: Path) -> str:
    """What of ours was slower than eager, and where our best with eager's bits was slower than
    torch.compile at its best: a line each."""
    _, whole = _models_of(folder / "models")
    _, parts = _models_of(folder / "few-layers")
    than_eager, than_compile = [], []
    for model in (*whole, *parts):
        gains = [
            f"`{row.config}` {gain:.2f}×"
            for row in model.rows
            if row.config.startswith(("exact", "fused", "fp8"))
            and (gain := model.speedup(row))
            and round(gain, 2) < 1
        ]
        if gains:
            than_eager.append(f"{_name(model)} {', '.join(gains)}")
        same = [r for c in ("exact", "exact+graphs") if (r := model.row(c)) and r.equal]
        ours, compiled = min(same, key=_ms, default=None), model.best_compiled
        if ours and compiled and _ms(ours) > _ms(compiled):
            than_compile.append(f"{_name(model)} {_ms(ours):.1f} against {_ms(compiled):.1f} ms")
    nothing = ["nothing that was measured"]
    return (
        f"*Slower than eager:* {'; '.join(than_eager or nothing)}.\n\n"
        "*Bit-identical, but slower than torch.compile at its best:* "
        f"{'; '.join(than_compile or nothing)}."
    )


def _models_of(folder: Path) -> tuple[list[Results], list[Model]]:
    files = read([folder])
    (device,) = devices(files)
    return files, list(device.models)


def one_size(folder: Path) -> tuple[list[Results], list[Model]]:
    """The models in order of their names, LTX-Video first; of several sizes the one that was
    measured in the most configurations, and of those the first that has a goal."""
    files, found = _models_of(folder)
    aims = list(GOALS)
    found.sort(key=lambda m: aims.index(m.title) if m.title in aims else len(aims))
    best: dict[str, Model] = {}
    for model in found:
        name = model.rows[0].workload.model
        if name not in best or _measured(model) > _measured(best[name]):
            best[name] = model
    order = sorted(best, key=lambda name: (name != LEAD, _is_language(best[name]), name))
    return files, [best[name] for name in order]


def _measured(model: Model) -> int:
    return sum(model.row(config) is not None for config in SHOWN if config != "fused+fa4+graphs")


def _is_language(model: Model) -> bool:
    return model.rows[0].workload.model.startswith(LANGUAGE_MODELS)


def _ms(row: ModelRow) -> float:
    return row.ms or 0.0


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"


def _name(model: Model) -> str:
    workload = model.rows[0].workload
    return f"`{workload.model}` {workload.size}"


def _model(model: Model, shown: Sequence[str]) -> str:
    eager = model.row("eager")
    cells = [f"{eager.ms:.1f}" if eager and eager.ms else "–"]
    for config in shown:
        row = model.row(config)
        same = " =" if row and row.equal else ""
        cells.append(f"{row.ms:.1f} ({model.speedup(row):.2f}×){same}" if row else "–")
    workload = model.rows[0].workload
    title = " ".join(word for word in (f"`{workload.model}`", workload.size) if word)
    return f"| {title} | {' | '.join(cells)} |"


def _one_depth(models: Sequence[Model]) -> list[Model]:
    """Of a model measured at several depths, the run with the most configurations."""
    best: dict[str, Model] = {}
    for model in models:
        workload = model.rows[0].workload
        sizes = tuple(item for item in workload.sizes if item[0] != "layers")
        title = replace(workload, sizes=sizes).title
        if title not in best or len(model.rows) > len(best[title].rows):
            best[title] = model
    return list(best.values())


def _graphs_gain(model: Model) -> float:
    row = model.row("exact+graphs")
    return (row and model.speedup(row)) or 0.0


def videos(folder: Path) -> str:
    """A line for each configuration that made a video, from prompt to frames."""
    files = read([folder])
    (device,) = devices(files)
    lines = [
        "| prompt to frames | run | s | ms/step | ms/frame | against eager | latents |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [line for video in device.videos for line in _video(video)]
    weights = ", ".join(dict.fromkeys(row.weights for file in files for row in file.video))
    note = f"{_about(files, weights)}; PSNR is of the last latents to eager's."
    return "\n".join([*lines, "", note])


def _video(video: Video) -> list[str]:
    lines = []
    for row in video.rows:
        if row.total_s and row.step_s and row.frame_s:
            times = (row.total_s, row.step_s * 1e3, row.frame_s * 1e3)
            cells = [video.title, row.config, *(f"{t:.1f}" for t in times)]
            lines.append(f"| {' | '.join(cells)} | {video.speedup(row):.2f}× | {psnr(row)} |")
    return lines


@dataclass
class _Seen:
    """What was seen with one PyTorch, on one GPU, with one set of packages."""

    compared: int = 0
    differing: int = 0
    models: dict[str, bool] = field(default_factory=dict)  # whether exact gave eager's bits
    ways: list[str] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)  # what no kernel repeats there


def pytorch(folder: Path) -> str:
    """A line for each PyTorch that exact modes were compared with."""
    seen: dict[tuple[str, str], _Seen] = {}
    for file in read([folder]):
        found = file.environment
        here = seen.setdefault((found.pytorch, found.device), _Seen())
        for row in file.exact:
            here.compared += row.elements
            here.differing += row.mismatches or 0
        for model in file.models:
            if model.config in ("exact", "exact+graphs") and model.equal is not None:
                name = str(model.workload)
                here.models[name] = here.models.get(name, True) and model.equal
        if file.kind == "calibration":
            _calibrated(here, file)
    lines = [
        "| torch | GPU | elements compared | differ | models with its bits | ways | runs eager |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, device), here in sorted(seen.items()):
        models = f"{sum(here.models.values())} of {len(here.models)}" if here.models else "–"
        ways, eager = (", ".join(dict.fromkeys(w)) or "–" for w in (here.ways, here.eager))
        count = f"{here.compared / 1e6:,.0f} million" if here.compared else "–"
        differ = f"{here.differing:,}" if here.compared else "–"
        lines.append(f"| {name} | {device} | {count} | {differ} | {models} | {ways} | {eager} |")
    return "\n".join(lines)


def _calibrated(here: _Seen, file: Results) -> None:
    for row in file.others:
        if row["way"] is None:
            here.eager.append(row["subject"])
            continue
        here.compared += row["compared"]
        here.differing += row["differing"]
        if row["way"] != ways.ATEN:
            here.ways.append(f"{row['subject']}: {row['way']}")


def _about(files: Sequence[Results], weights: str) -> str:
    first = files[0].environment
    commits = sorted({(file.environment.commit or "unknown")[:7] for file in files})
    versions = f"torch {first.torch}, triton {first.triton}"
    return f"{first.gpu}, {versions}, {weights}, commit {', '.join(commits)}"
