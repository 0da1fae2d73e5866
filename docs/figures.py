"""Tables and the picture of README.md and docs/, made from `results/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelwright.report import generation, readme_tables
from kernelwright.report.figures import Device, Model, devices
from kernelwright.report.markup import Html, joined, tag
from kernelwright.report.parsing import OTHER_SIZE
from kernelwright.report.png import COLOURS
from kernelwright.report.reading import Results, read
from kernelwright.report.rows import OpRow, Workload
from kernelwright.report.training import HEAD, figures

FONT = "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif"
LABEL, BAR, WIDTH, TOP, LINE = 236, 330, 760, 64, 42


def _device(*paths: Path) -> tuple[list[Results], Device]:
    files = read(paths)
    (device,) = devices(files)
    return files, device


def _about(files: Sequence[Results]) -> str:
    """The environment that a table comes from."""
    first = files[0].environment
    commits = ", ".join(sorted({(f.environment.commit or "unknown")[:7] for f in files}))
    versions = f"driver {first.driver}, torch {first.torch}, triton {first.triton}"
    return f"{first.gpu}, {versions}, commit {commits}."


def speedups(results: Path) -> str:
    """The time of one forward as a share of eager's, for each model, as an SVG file."""
    files, found = readme_tables.one_size(results / "models")
    models = [model for model in found if model.best_exact]
    height = TOP + LINE * len(models) + 34
    keys = {"compile": "torch.compile", "exact": "kernelwright, bit-identical to eager"}
    pieces = [
        tag("rect", width=f"{WIDTH}", height=f"{height}", rx="8", fill=COLOURS["paper"]),
        _text(20, 30, "Time of one forward: the whole bar is eager. Shorter is better.", 15, 600),
    ]
    for number, (colour, name) in enumerate(keys.items()):
        x = 20 + 140 * number
        pieces += [_bar(x, 42, 12, 10, colour), _text(x + 18, 51, name, 12)]
    for number, model in enumerate(models):
        pieces += _compared(model, TOP + LINE * number + 8)
    where = files[0].environment
    note = f"{where.device}, torch {where.torch}, random weights, bfloat16"
    pieces.append(_text(20, height - 14, note, 11, colour="soft"))
    picture = tag(
        "svg",
        joined(pieces, "\n"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=f"{WIDTH}",
        height=f"{height}",
        font_family=FONT,
    )
    return f"{picture}\n"


def _compared(model: Model, y: int) -> list[Html]:
    """Two bars over the whole one of eager, with what they gain."""
    title = model.title.removesuffix(" batch 2")
    pieces = [_text(LABEL - 10, y + 19, title, 12, end=True), _bar(LABEL, y, BAR, 32, "track")]
    rows = {"compile": model.best_compiled, "exact": model.best_exact}
    for (colour, row), top in zip(rows.items(), (y + 2, y + 17), strict=True):
        gain = model.speedup(row) if row else None
        if row and gain:
            also = f", {' '.join(row.config.split('+')[1:])}" if "+" in row.config else ""
            said = f"{gain:.2f}×{also}"
            length = min(BAR, BAR / gain)
            pieces += [_bar(LABEL, top, length, 13, colour)]
            pieces += [
                _text(LABEL + BAR + 10, top + 11, said, 12, 600 if colour == "exact" else 400)
            ]
    return pieces


def _bar(x: float, y: float, width: float, height: float, colour: str) -> Html:
    sizes = {"x": f"{x}", "y": f"{y}", "width": f"{width:.1f}", "height": f"{height}"}
    return tag("rect", fill=COLOURS[colour], **sizes)


def _text(
    x: int,
    y: int,
    text: str,
    size: int,
    weight: int = 400,
    end: bool = False,
    colour: str = "ink",
) -> Html:
    return tag(
        "text",
        text,
        x=f"{x}",
        y=f"{y}",
        font_size=f"{size}",
        font_weight=f"{weight}",
        text_anchor="end" if end else "start",
        fill=COLOURS[colour],
    )


def op_times(results: Path) -> str:
    """A line for each op and shape: GPU microseconds beside PyTorch and torch.compile."""
    files, device = _device(*sorted(results.glob("ops*.json")))
    return "\n".join([op_table(device.ops), "", _about(files)])


def op_table(rows: Sequence[OpRow], named: bool = True) -> str:
    head = ["op"] * named + ["shape", "eager", "torch.compile", "ours", "exact", "copy", "of copy"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        exact = row.slowest_exact
        figures = [
            _us(row, "eager"),
            _us(row, "compile"),
            f"{_us(row, row.chosen)} ({row.chosen})",
            _us(row, exact) if exact else "–",
            f"{row.copy_us:.1f}",
            f"{row.share(row.chosen):.0%}",
        ]
        cells = [f"`{row.op}`"] * named + [row.case, *figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _us(row: OpRow, way: str) -> str:
    return f"{row.us[way]:.1f}" if way in row.us else "–"


def exactness(results: Path) -> str:
    """A line for each op and eager chain: elements compared, and how many differed."""
    files, device = _device(results / "exact.json")
    counted: dict[tuple[str, str], list[int]] = {}
    for row in device.exact:
        if row.mismatches is not None:
            sums = counted.setdefault((row.op, row.chain), [0, 0, 0])
            sums[0] += 1
            sums[1] += row.elements
            sums[2] += row.mismatches
    lines = ["| op | chain | shapes and dtypes | elements | differ |", "|---|---|---|---|---|"]
    for (op, chain), (shapes, elements, differ) in counted.items():
        lines.append(f"| `{op}` | {chain} | {shapes} | {elements / 1e6:.1f} million | {differ} |")
    return "\n".join([*lines, "", _about(files)])


def first_results(results: Path) -> str:
    """Seconds to the first result of each model. Where new processes were timed: with empty caches,
    with warm ones, and the first forwards at another size."""
    files, device = _device(results / "models")
    processes = read([results / "first"])
    timed = dict(cell for file in processes for cell in _of_processes(file))
    shown = ("eager", "compile", "exact", "exact+graphs", "fused")
    models = {model.title: model for model in device.models}
    lines = [f"| first forward, s | {' | '.join(shown)} |", "|---|" + "---|" * len(shown)]
    for title in dict.fromkeys([*models, *(title for title, _ in timed)]):
        rows = models[title].rows if title in models else ()
        seconds = {r.config: f"{r.first_s:.1f}" for r in rows if r.first_s is not None}
        cells = [timed.get((title, config)) or seconds.get(config, "–") for config in shown]
        lines.append(f"| `{title}` | {' | '.join(cells)} |")
    commits = ", ".join(sorted({(f.environment.commit or "unknown")[:7] for f in processes}))
    about = f"{_about(files)} Processes of their own: commit {commits}."
    return "\n".join([*lines, "", about])


def _of_processes(file: Results) -> Iterator[tuple[tuple[str, str], str]]:
    """What to show for the models and configurations of a file."""
    for values in file.others:
        sizes = tuple(values["sizes"].items())
        title = Workload(values["model"], sizes, values["dtype"], values["tiny"]).title
        other = [values[name] for name in OTHER_SIZE if name in values]
        yield (title, values["config"]), _seconds(values["cold_s"], values["warm_s"], other)
    for row in file.models:
        if row.cold_s is not None and row.warm_s is not None:
            cell = _seconds(row.cold_s, row.warm_s, row.other_s)
            yield (row.workload.title, row.config), cell


def _seconds(cold: float, warm: float, other: Sequence[float]) -> str:
    return f"{cold:.1f} cold, {warm:.1f} warm; another size {', '.join(f'{s:.2g}' for s in other)}"


def hub_calls(results: Path) -> str:
    """Time on the host of a call of rmsnorm, on each backend and in PyTorch."""
    (file,) = read([results / "hub.json"])
    ways = list(file.others[0]["host_us"])
    lines = [f"| host µs of a call | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for row in file.others:
        cells = [f"{row['host_us'][way]:.1f}" for way in ways]
        lines.append(f"| `{row['op']}` {row['case']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _about([file])])


def fp8_attention(results: Path) -> str:
    """Attention in eight bits beside cuDNN's, at the sizes of models."""
    (file,) = read([results / "fp8-attention.json"])
    peers, ours = ("cuDNN, bfloat16", "cuDNN, fp8"), "ours, with quantising"
    head = (*peers, "ours", "quantising before it", "both", "speed-up", "error", "of cuDNN in fp8")
    lines = [f"| µs | head_dim | {' | '.join(head)} |", "|---|" + "---:|" * (len(head) + 1)]
    for row in file.others:
        us, error = row["gpu_us"], row["error"]
        times = [f"{us[way]:.1f}" for way in (*peers, "ours", "quantising", ours)]
        cells = [*times, f"{row['speedup']:.2f}×", *(f"{error[w]:.1%}" for w in (ours, peers[1]))]
        size = f"{row['size']}, {row['tokens']:,} tokens"
        lines.append(f"| {size} | {row['head_dim']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _about([file])])


def training(results: Path) -> str:
    """One training step of each configuration, once there are results of them."""
    folder = results / "training"
    if not folder.exists():
        return "None has been recorded yet."
    files, device = _device(folder)
    lines = [f"| one step | {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 1)]
    for model in device.training:
        for row in model.rows:
            lines.append(f"| `{model.title}` | {' | '.join(figures(model, row))} |")
    return "\n".join((*lines, "", _about(files)))


def decoding(results: Path) -> str:
    """Tokens per second of language models, once there are results of them."""
    folder = results / "generation"
    if not folder.exists():
        return "None has been recorded yet."
    files, device = _device(folder)
    head = (*generation.HEAD, "tokens", "bits")
    lines = [f"| generation | {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 1)]
    for model in device.generation:
        for row in model.rows:
            cells = " | ".join(generation.figures(model, row))
            lines.append(f"| `{model.title}` | {cells} |")
    return "\n".join((*lines, "", _about(files)))


def generations(results: Path) -> str:
    """Whole videos from prompt to frames, once there are results of them."""
    folder = results / "videos"
    return readme_tables.videos(folder) if folder.exists() else "None has been recorded yet."
