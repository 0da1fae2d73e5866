"""The section about whole videos: from prompt to frames, each configuration beside eager."""

from __future__ import annotations

from collections.abc import Sequence

from .charts import Bar, bars, legend
from .figures import Video
from .markup import NONE, Html, joined, number, table, tag
from .rows import VideoRow
from .waterfall import part_colours, stacked

PARTS = ("text", "denoise", "decode")


def videos_section(videos: Sequence[Video]) -> list[Html]:
    """For each video: seconds by part, and a table of the configurations."""
    colours = part_colours(PARTS)
    note = "Seconds from prompt to frames. PSNR is of the last latents against eager's."
    articles = [tag("article", joined(_video(video), "\n")) for video in videos]
    return [
        tag("p", note, class_="note"),
        legend([(colours[part], part) for part in PARTS]),
        *articles,
    ]


def _video(video: Video) -> list[Html]:
    colours = part_colours(PARTS)
    lines = [
        Bar(row.config, f"{row.total_s:.2f} s", stacked(row.parts, colours, "s"))
        for row in video.rows
        if row.total_s is not None and row is not video.control
    ]
    first = video.rows[0]
    guidance = "" if first.guidance is None else f", guidance {first.guidance:g}"
    about = [f"{first.weights.capitalize()}{guidance}.", control_sentence(video)]
    notes = [text for row in video.rows for text in _notes(row)]
    return [
        tag("h4", video.title),
        bars(lines, f"{video.title}: seconds of each way") if lines else Html(""),
        _table(video),
        *(tag("p", text, class_="note") for text in (*about, *notes) if text),
    ]


def control_sentence(video: Video) -> str:
    """Whether eager repeats itself: the control."""
    control = video.control
    if control is None:
        return "Eager ran once only: nothing shows whether it repeats itself."
    if control.equal:
        return "Eager against itself, the control: the same bits."
    return f"Eager against itself, the control: {psnr(control)}; no way can be asked for its bits."


def _table(video: Video) -> Html:
    head = ["run", "total s", "speed-up", "PSNR", "ms a step", "ms a frame"]
    head += [*(f"{part} s" for part in PARTS), "GiB", "ready s"]
    rows = []
    for row in video.rows:
        gain = video.speedup(row)
        rows.append(
            [
                row.config,
                number(row.total_s, ".2f") if not row.failed else "wrong",
                f"{gain:.2f}×" if gain else NONE,
                NONE if row.config == "eager" else psnr(row),
                _milliseconds(row.step_s),
                _milliseconds(row.frame_s),
                *(number(row.parts.get(part), ".2f") for part in PARTS),
                number(row.gib, ".1f"),
                number(row.ready_s, ".1f"),
            ]
        )
    return table(head, rows)


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1e3:.1f}"


def psnr(row: VideoRow) -> str:
    if row.equal:
        return "same bits"
    return NONE if row.psnr_db is None else f"{row.psnr_db:.1f} dB"


def _notes(row: VideoRow) -> list[str]:
    without = [g for g in row.graphs if "without" in g]
    failed = [row.failed] if row.failed else []
    return [f"{row.config}: {text}" for text in (*failed, *row.problems, *without)]
