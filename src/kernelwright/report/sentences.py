"""The sentences at the top of the page: the main findings, and their limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from .figures import Device, Model, Profile, Video
from .rows import CPU

USUAL = "ltx-video"  # the model that the kernels were first written for


def lead(found: Sequence[Device]) -> list[str]:
    """The findings, the most important first, and what a reader needs to judge them."""
    real = [(d, m) for d in found if d.name != CPU for m in d.models if not _tiny(m)]
    gains = [(d, m) for d, m in real if m.best_exact]
    sentences = [*_model_sentences(gains)]
    if not gains and any(d.models or d.videos for d in found):
        shown = [v for d in found if d.name != CPU for v in d.videos if not _tiny(v)]
        if not shown:
            sentences.append("Nothing of full size was timed on a GPU: the times here say nothing.")
    for device in found:
        sentences += [s for v in device.videos if (s := video_sentence(device, v))]
    slower = [
        f"{r.workload.model} {r.config} {m.speedup(r):.2f}×"
        for _, m in real
        for r in m.rows
        if r.replaced is not None and round(m.speedup(r) or 1, 2) < 1
    ]
    if slower:
        sentences.append(f"Slower than eager: {', '.join(slower)}.")
    if failed := [name for device in found for name in _failed(device)]:
        sentences.append(f"Failed: {', '.join(failed)}.")
    for device in found if not gains else ():
        sentences += [ops_sentence(device)] if device.ops else []
        sentences += [exact_sentence(device)] if device.exact else []
        sentences += [s for p in device.profiles if (s := profile_sentence(p))]
    return sentences or [f"{sum(len(d.files) for d in found)} result files."]


def _failed(device: Device) -> Iterator[str]:
    """What gave a wrong result; a configuration that is unavailable here did not fail."""
    for model in (*device.models, *device.loops):
        wrong = (r for r in model.rows if r.failed and not r.unavailable)
        yield from (f"{r.workload.model} {r.config}" for r in wrong)
    for training in device.training:
        failed = (t for t in training.rows if t.failed and not t.unavailable)
        yield from (f"training {t.workload.model} {t.config}" for t in failed)
    for generation in device.generation:
        yield from (f"{g.workload.model} {g.config}" for g in generation.rows if g.failed)
    for video in device.videos:
        yield from (f"{r.workload.model} {r.config}" for r in video.rows if r.failed)
    yield from (f"{row.op} {row.case}" for row in device.ops if row.failed)


def _tiny(group: Model | Video) -> bool:
    return group.rows[0].workload.tiny


def _eager_ms(model: Model) -> float:
    row = model.row("eager")
    return (row and row.ms) or 0.0


def _model_sentences(gains: Sequence[tuple[Device, Model]]) -> Iterator[str]:
    if not gains:
        return
    # a model counts once, at its largest: the gain of a small one is often that of launching it
    largest: dict[str, tuple[Device, Model]] = {}
    for found in sorted(gains, key=lambda found: _eager_ms(found[1])):
        largest[found[1].rows[0].workload.model] = found
    if len(largest) > 1:
        middle = statistics.median(model.gain for _, model in largest.values())
        models = f"{len(largest)} models, each at its fastest with the same bits"
        yield f"Median of {models}: {middle:.2f}×."
    usual = [largest[USUAL]] if USUAL in largest else list(largest.values())
    device, model = max(usual, key=lambda found: _eager_ms(found[1]))
    assert model.best_exact
    how = f"{model.best_exact.config} on {device.name}"
    yield f"{model.title}: {model.gain:.2f}× with the same bits ({how})."
    pairs = [(m.title, m.best_exact, m.best_compiled) for _, m in gains]
    known = [(title, a.ms, b.ms) for title, a, b in pairs if a and b and a.ms and b.ms]
    if known:
        slower = [title for title, a, b in known if a >= b]
        told = (
            f"Faster than torch.compile at its best in {len(known) - len(slower)} of {len(known)}"
        )
        yield f"{told}{', not in ' if slower else ''}{', '.join(slower)}."


def video_sentence(device: Device, video: Video) -> str | None:
    """The fastest configuration with the same latents; empty for a tiny model or the CPU."""
    same = [r for r in video.rows if r.equal and r.config != "eager" and r is not video.control]
    best = max(same, key=lambda r: video.speedup(r) or 0.0, default=None)
    gain = best and video.speedup(best)
    if device.name == CPU or _tiny(video) or not best or not gain:
        return None
    return (
        f"A whole video, {video.title}: {best.total_s:.1f} s, {gain:.2f}× with the same bits "
        f"({best.config} on {device.name})."
    )


def profile_sentence(profile: Profile) -> str | None:
    if profile.steps is None:
        return None
    old, new = profile.steps
    return f"{profile.title}: {old.config} {old.ms:.1f} ms, {new.config} {new.ms:.1f} ms."


def ops_sentence(device: Device) -> str:
    shares = [row.share(row.chosen) for row in device.ops if row.chosen in row.us]
    cases = f"{len(device.ops)} case{'s' if len(device.ops) > 1 else ''} of ops on {device.name}"
    if not shares:
        return f"{cases}."
    return (
        f"{cases}: the chosen kernel reaches "
        f"{statistics.median(shares):.0%} of the bandwidth of a copy (median), "
        f"{min(shares):.0%} at the least."
    )


def exact_sentence(device: Device) -> str:
    covered = [row for row in device.exact if row.mismatches is not None]
    elements = sum(row.elements for row in covered)
    wrong = sum(row.mismatches or 0 for row in covered)
    chains = len({(row.op, row.chain) for row in covered})
    left = len(device.exact) - len(covered)
    return (
        f"{len(covered):,} sizes of {chains} exact modes, {elements:,} elements compared with "
        f"eager on {device.name}: {wrong:,} mismatches"
        + (f"; {left:,} sizes have no exact kernel." if left else ".")
    )
