"""Turns the rows of a result file into typed rows: one function for each kind of file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .json_values import Values
from .rows import (
    RANDOM,
    CountedRow,
    ExactRow,
    GenerationRow,
    Kernel,
    ModelRow,
    OpRow,
    ProfileRow,
    TrainingRow,
    VideoRow,
    Workload,
)

# the peers of older files, which do not name them
PEERS = ("eager", "compile")
# the first forwards at another size, as far as a file has them
OTHER_SIZE = ("other_first_s", "other_second_s", "other_third_s", "other_fourth_s")


def _workload(row: Values) -> Workload:
    return Workload(
        model=row.text("model"),
        sizes=tuple(row.table("sizes").items()),
        dtype=row.text("dtype"),
        tiny=row.flag("tiny"),
    )


def _model(row: Values, head: Values) -> ModelRow:
    values = row.values
    failed = row.text("failed") if "failed" in values else None
    replaced = values.get("replaced")
    return ModelRow(
        workload=_workload(row),
        config=row.text("config"),
        ms=None if failed else row.time("ms"),
        failed=failed,
        unavailable=bool(values.get("unavailable")),
        equal=None if failed else row.flag("equal"),
        error=row.maybe("error"),
        psnr=row.maybe("psnr"),
        first_s=row.maybe("first_s"),
        cold_s=row.maybe("cold_s"),
        warm_s=row.maybe("warm_s"),
        other_s=tuple(s for name in OTHER_SIZE if (s := row.maybe(name)) is not None),
        peak_gib=row.maybe("peak_gib"),
        steady_reserved_gib=row.maybe("steady_reserved_gib"),
        replaced=None if replaced is None else row.count("replaced"),
        sites=values.get("sites") or {},
        problems=_problems(row),
        graphs=row.texts("graphs"),
        split=row.times("split", zero=True) if values.get("split") else {},
        others=row.times("others", zero=True) if values.get("others") else {},
    )


def _problems(row: Values) -> tuple[str, ...]:
    found = row.values.get("problems") or ()
    return tuple(p if isinstance(p, str) else _problem(p) for p in found)


def _problem(problem: dict[str, Any]) -> str:
    return f"{problem.get('module', '?')}: {problem.get('problem', '?')}"


def _training(row: Values, head: Values) -> TrainingRow:
    failed = row.text("failed") if "failed" in row.values else None
    counts = ("gradients", "gradients_equal", "gradients_repeated", "losses", "losses_equal")
    return TrainingRow(
        workload=_workload(row),
        lora=None if row.values.get("lora") is None else row.count("lora"),
        checkpointing=row.flag("checkpointing"),
        attention=row.text("attention"),
        config=row.text("config"),
        ms=None if failed else row.time("ms"),
        failed=failed,
        unavailable=bool(row.values.get("unavailable")),
        error=row.maybe("error"),
        first_s=row.maybe("first_s"),
        gib=row.maybe("reserved_gib"),
        problems=_problems(row),
        **{name: 0 if failed else row.count(name) for name in counts},
    )


def _generation(row: Values, head: Values) -> GenerationRow:
    failed = row.text("failed") if "failed" in row.values else None
    for name in ("prompt", "new_tokens", "batch_size"):
        Values(f"{row.where}: sizes", row.table("sizes")).count(name)
    return GenerationRow(
        workload=_workload(row),
        config=row.text("config"),
        ms=None if failed else row.time("ms"),
        failed=failed,
        tokens_per_s=None if failed else row.time("tokens_per_s"),
        first_token_ms=None if failed else row.time("first_token_ms"),
        first_call_s=row.maybe("first_call_s"),
        tokens_equal=None if failed else row.flag("tokens_equal"),
        equal=None if failed else row.flag("equal"),
        eager_repeats="eager_repeats" not in row.values or row.flag("eager_repeats"),
    )


def _op(row: Values, head: Values) -> OpRow:
    us = row.times("gpu_us") or row.maybe_times("wall_us")
    failed = row.values.get("failed") or {}
    return OpRow(
        op=row.text("op"),
        case=row.text("case"),
        dtype=row.text("dtype"),
        chosen=row.text("chosen"),
        megabytes=row.time("megabytes"),
        copy_us=row.time("copy_us"),
        us=us,
        host_us=row.times("host_us"),
        error=row.maybe_times("error"),
        peers=tuple(row.values.get("over") or (way for way in PEERS if way in us)),
        failed=tuple(f"{way}: {why}" for way, why in failed.items()),
    )


def _exact(row: Values, head: Values) -> ExactRow:
    covered = "not_covered" not in row.values
    return ExactRow(
        op=row.text("op"),
        chain=row.text("chain"),
        dtype=row.text("dtype"),
        width=row.count("width"),
        rows=row.count("rows"),
        elements=row.count("elements") if covered else 0,
        mismatches=row.count("mismatches") if covered else None,
    )


def _video(row: Values, head: Values) -> VideoRow:
    failed = row.text("failed") if "failed" in row.values else None
    settings = Values(f"{head.where}: settings", head.table("settings"))
    names = ("batch", "frames", "height", "width")
    parts = ("text", "denoise", "decode")
    return VideoRow(
        workload=Workload(
            model=head.values.get("model") or "ltx-video",
            sizes=tuple((name, settings.count(name)) for name in names),
            dtype=head.text("dtype"),
            tiny=head.flag("tiny"),
        ),
        weights="the model's weights" if head.values.get("model") else RANDOM,
        steps=settings.count("steps"),
        guidance=settings.maybe("guidance_scale"),
        config=row.text("config"),
        failed=failed,
        equal=row.flag("equal"),
        psnr_db=row.maybe("psnr_db"),
        total_s=None if failed else row.time("total_s"),
        step_s=None if failed else row.time("step_s"),
        frame_s=None if failed else row.time("frame_s"),
        parts={} if failed else {part: row.time(f"{part}_s") for part in parts},
        gib=row.maybe("reserved_gib"),
        ready_s=row.maybe("ready_s"),
        problems=_problems(row),
        graphs=row.texts("graphs"),
    )


def _profile(row: Values, head: Values) -> ProfileRow | CountedRow:
    return _counted(row) if row.count("level") == 3 else _kernels(row)


def _kernels(row: Values) -> ProfileRow:
    breaks = row.values.get("graph_breaks")
    return ProfileRow(
        workload=_workload(row),
        level=row.count("level"),
        config=row.text("config"),
        kernel_ms=row.time("kernel_ms"),
        wall_ms=row.maybe("wall_ms"),
        launches=row.count("launches"),
        categories=row.times("categories", zero=True),
        kernels=tuple(
            Kernel(k.text("name"), k.text("category"), k.flag("ours"), k.count("calls"), ms)
            for k in row.rows("kernels")
            if (ms := k.maybe("ms")) is not None
        ),
        graph_breaks=Values(row.where, breaks).count("breaks") if breaks else None,
    )


def _counted(row: Values) -> CountedRow:
    limiter = row.values.get("limiter")
    return CountedRow(
        workload=_workload(row),
        config=row.text("config"),
        name=row.text("name"),
        grid=row.text("grid"),
        block=row.text("block"),
        launches=row.count("launches"),
        us=row.maybe("us"),
        dram_gbs=row.maybe("dram_gbs"),
        dram_percent=row.maybe("dram_percent"),
        compute_percent=row.maybe("compute_percent"),
        occupancy=row.maybe("occupancy"),
        theoretical_occupancy=row.maybe("theoretical_occupancy"),
        limiter=None if limiter is None else row.text("limiter"),
        advice=row.text("advice"),
    )


KINDS: dict[str, Callable[[Values, Values], Any]] = {
    "models": _model,
    "training": _training,
    "generation": _generation,
    "ops": _op,
    "exact": _exact,
    "video": _video,
    "profile": _profile,
}
