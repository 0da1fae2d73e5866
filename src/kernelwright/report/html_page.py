"""The report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from ..measure.cpu_caveat import CAVEAT
from .figures import Device, devices, short
from .generation import generation_section
from .markup import NONE, STYLE, Html, joined, table, tag
from .models import loops_section, models_section
from .ops import ops_section
from .other_kinds import others_section
from .profiles import profiles_section
from .reading import Results
from .rows import CPU
from .sentences import exact_sentence, lead, ops_sentence
from .training import training_section
from .videos import videos_section


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
    top += (tag("p", f"{NONE} stands for what was not measured.", class_="note"),)
    body = joined((tag("header", joined(top)), *map(_device, found), _environment(files)), "\n")
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", body)}\n</html>\n'


def _paragraphs(sentences: Sequence[str]) -> list[Html]:
    return [tag("p", s) for s in sentences]


def _device(device: Device) -> Html:
    pieces: list[str] = [tag("h2", device.name)]
    if device.name == CPU:
        pieces.append(tag("p", CAVEAT, class_="bad"))
    if device.models:
        pieces += [tag("h3", "Models"), *models_section(device.models)]
    if device.loops:
        pieces += [tag("h3", "Denoising loops"), *loops_section(device.loops)]
    if device.training:
        pieces += [tag("h3", "Training"), *training_section(device.training)]
    if device.generation:
        pieces += [tag("h3", "Text generation"), *generation_section(device.generation)]
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
