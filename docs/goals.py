"""What the models are to reach on an H200, beside what they have: tables made from `results/`."""

from __future__ import annotations

from pathlib import Path

from kernelwright.profiling.kernel_tables import short_name
from kernelwright.report.figures import Model, devices
from kernelwright.report.goals import GOALS
from kernelwright.report.reading import read
from kernelwright.report.rows import ModelRow

# how much faster than eager and than torch.compile: exact, fused; fp8 than eager
HEAD = ("exact : eager", "exact : compile", "fused : eager", "fused : compile", "fp8 : eager")
MEMORY = ("exact", "exact+graphs", "fused+graphs", "fp8+graphs")
KINDS = ("GEMM", "attention", "fused", "other")
WITH_FA4 = {"wan-1.3b 81f 832×480": (1.35, 1.15)}


def goals(results: Path) -> str:
    """One line a model: what each tier reached of its goal, with graphs where that is faster."""
    models = _models(results)
    lines = [f"| | {' | '.join(HEAD)} |", "|---|" + "---|" * len(HEAD)]
    for title, wanted in GOALS.items():
        model = models[title]
        exact, fused, fp8 = (_best(model, tier) for tier in ("exact", "fused", "fp8"))
        cells = [*_both(model, exact, wanted[:2]), *_both(model, fused, wanted[2:4])]
        cells += _both(model, fp8, (wanted[4],))
        lines.append(f"| `{title}` | {' | '.join(cells)} |")
        if (extra := model.row("fused+fa4+graphs")) is not None:
            aims = WITH_FA4.get(title, wanted[2:4])
            fp8 = model.row("fp8+fa4+graphs")
            cells = ["", "", *_both(model, extra, aims), *_both(model, fp8, (wanted[4],))]
            lines.append(f"| with flash-attn-4 | {' | '.join(cells)} |")
    return "\n".join(lines)


def numerics(results: Path) -> str:
    """One line a model: what it costs in accuracy and memory, as multiples of eager's."""
    head = ("exact", "fused", "fp8", "torch.compile")
    lines = [
        f"| | error of {' | '.join(head)} | memory of {' | '.join(MEMORY)} |",
        "|---|" + "---|" * (len(head) + len(MEMORY)),
    ]
    models = _models(results)
    for title in GOALS:
        model = models[title]
        eager = model.row("eager")
        assert eager is not None
        rows = [*(_best(model, tier) for tier in head[:3]), model.row("compile")]
        cells = ["same bits" if r and r.equal else _ratio(r, eager, "error") for r in rows]
        cells += [_ratio(model.row(c), eager, "steady_reserved_gib") for c in MEMORY]
        lines.append(f"| `{title}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def fp8_memory(results: Path) -> str:
    """What the tier fp8 holds beside eager, in runs of these two alone."""
    (device,) = devices(read([results.with_name("h200-fp8-memory")]))
    head = ("eager", "fp8, graphs", "reserved, eager", "reserved, fp8", "share")
    lines = [f"| ms, GiB | {' | '.join(head)} |", "|---|" + "---:|" * len(head)]
    for model in device.models:
        eager, ours = model.row("eager"), model.row("fp8+graphs")
        assert eager is not None
        assert ours is not None
        cells = [f"{eager.ms:.1f}", f"{ours.ms:.1f} ({_ratio(eager, ours, 'ms')})"]
        cells += [f"{row.steady_reserved_gib:.1f}" for row in (eager, ours)]
        cells.append(_ratio(ours, eager, "steady_reserved_gib"))
        lines.append(f"| `{model.title}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def splits(results: Path) -> str:
    """Where the milliseconds of a forward go, for the models that have a goal."""
    lines = [f"| | | ms | {' | '.join(KINDS)} |", "|---|---|---|" + "---|" * len(KINDS)]
    models = _models(results)
    for title in GOALS:
        for config in ("eager", "compile", "exact+graphs", "fused+graphs", "fp8+graphs"):
            row = models[title].row(config)
            if row is not None and row.split:
                cells = [f"{row.ms:.1f}", *(f"{row.split[kind]:.1f}" for kind in KINDS)]
                lines.append(f"| `{title}` | {config} | {' | '.join(cells)} |")
    return "\n".join(lines)


def without_recipes(results: Path) -> str:
    """Models that have a recipe, by it and without it: milliseconds of one forward."""
    (device,) = devices(read([results.with_name("h200-programs")]))
    ways = ("exact", "exact+graphs", "fused+graphs", "fp8+graphs")
    ways = tuple(w for w in ways if any(m.row(w) for m in device.models))
    head = (f"`{way.replace('+', ' + ')}`: recipe | programs" for way in ways)
    lines = [f"| ms | {' | '.join(head)} |", "|---|" + "---:|" * 2 * len(ways)]
    for model in device.models:
        cells = []
        for way in ways:
            tier, _, graphs = way.partition("+")
            for row in (model.row(way), model.row("+".join([tier, "programs", graphs]).strip("+"))):
                assert row is None or tier != "exact" or row.equal
                cells.append("–" if row is None else f"{row.ms:.1f}")
        lines.append(f"| `{model.title}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def left(results: Path) -> str:
    """What is left to PyTorch's single ops in `exact`, of models without recipes."""
    (device,) = devices(read([results / "few-layers"]))
    newest: dict[str, ModelRow] = {}
    for model in device.models:
        row = model.row("exact+graphs")
        if row is not None and "fused" in row.split:  # older files count ours among the others
            newest[model.rows[0].workload.model] = row
    lines = ["| ms, `exact` with graphs | GEMM | attention | ours | PyTorch's ops | share |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, row in sorted(newest.items(), key=lambda item: -_share(item[1])):
        cells = [f"{row.split[kind]:.2f}" for kind in KINDS]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_share(row):.1%} |")
    named = {n: row for n, row in newest.items() if row.others}
    lines += [""] if named else []
    for name, row in sorted(named.items()):
        slowest = ", ".join(f"`{short_name(k)}` {ms:.3f} ms" for k, ms in row.others.items())
        lines.append(f"- {name}: {slowest}")
    return "\n".join(lines)


def _share(row: ModelRow) -> float:
    return row.split["other"] / sum(row.split.values())


def _models(results: Path) -> dict[str, Model]:
    (device,) = devices(read([results / "models"]))
    return {model.title: model for model in device.models}


def _best(model: Model, tier: str) -> ModelRow | None:
    rows = (model.row(tier), model.row(f"{tier}+graphs"))
    return min((r for r in rows if r is not None), key=lambda r: r.ms or 0.0, default=None)


def _both(model: Model, row: ModelRow | None, wanted: tuple[float, ...]) -> list[str]:
    """Against eager, then against torch.compile, as far as goals are given."""
    others = (model.row("eager"), model.row("compile"))
    return [_cell(other, row, goal) for other, goal in zip(others, wanted, strict=False)]


def _cell(other: ModelRow | None, row: ModelRow | None, goal: float) -> str:
    if not (other and row and other.ms and row.ms):
        return f"– (goal {goal})"
    reached = other.ms / row.ms
    # goals are given to two places, and reached or not as they are read
    return f"{reached:.2f}" if round(reached, 2) >= goal else f"**{reached:.2f}** (goal {goal})"


def _ratio(row: ModelRow | None, eager: ModelRow, name: str) -> str:
    value, own = getattr(row, name, None), getattr(eager, name)
    return f"{value / own:.2f}×" if value is not None and own else "–"
