"""The tables of README.md, made from the declared ops and from `results/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import catalog
from ..ops import ways
from .figures import Model, Video, devices
from .reading import Results, read
from .rows import RANDOM
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


def update(readme: Path, results: Path) -> None:
    """Write the tables between the markers of README.md."""
    sections: dict[str, Callable[[], str]] = {
        "ops": lambda: catalog.markdown(catalog.entries()),
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
        "| prompt to frames | run | s | ms a step | ms a frame | against eager | latents |",
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
        name = " ".join([found.torch or "unknown", *_packages(file)])
        here = seen.setdefault((name, found.device), _Seen())
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


def _packages(file: Results) -> list[str]:
    """Packages beside PyTorch that replace its kernels."""
    named = next((row.get("packages") for row in file.others if file.kind == "calibration"), None)
    return [f"with {package}" for package in named or ()]


def _about(files: Sequence[Results], weights: str) -> str:
    first = files[0].environment
    commits = sorted({(file.environment.commit or "unknown")[:7] for file in files})
    versions = f"torch {first.torch}, triton {first.triton}"
    return f"{first.gpu}, {versions}, {weights}, commit {', '.join(commits)}"
