"""What the command line says: help pages, unknown names, narrow terminals, warnings."""

import warnings

import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from kernelwright import close_names, demo_picture, inspect, models
from kernelwright.backends.user_warnings import warn
from kernelwright.bench import models_table
from kernelwright.cli import app
from kernelwright.commands import video
from kernelwright.inject.report.architecture import Architecture, shortened
from kernelwright.measure.cpu_caveat import CAVEAT

COMMANDS = {
    "": "doctor demo models inspect ops generate bench profile report compare new check skill hub",
    "bench": "model video loop generate train ops",
}
PAGES = [[], ["bench"], *([c] for c in COMMANDS[""].split())]
PAGES += [["bench", c] for c in COMMANDS["bench"].split()]
WITH_TIERS = [["inspect"], ["generate"], ["profile"], ["bench", "model"], ["bench", "video"]]
WITH_TIERS += [["bench", "generate"]]


def invoke(*args, columns=80):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": str(columns)})


def words(text):
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_a_flag_is_shown_as_a_flag_and_nothing_is_cut(page):
    said = invoke(*page, "--help").output
    assert "--help" in said
    assert "<bool>" not in said
    assert "…" not in said


@pytest.mark.parametrize("group", list(COMMANDS))
def test_commands_are_listed_in_the_order_of_use(group):
    said = invoke(*group.split(), "--help").output
    starts = [line[2:].split(" ")[0] for line in said.splitlines() if line.startswith("│ ")]
    names = COMMANDS[group].split()
    assert [name for name in starts if name in names] == names


@pytest.mark.parametrize("page", WITH_TIERS, ids=" ".join)
def test_help_that_lists_tiers_lists_fp8(page):
    assert "fp8" in invoke(*page, "--help").output


def test_a_name_without_resemblance_gets_no_long_list():
    known = list(models.presets())
    assert close_names.suggestion("ltx-vidio", known, "x").startswith("did you mean ltx-video")
    assert close_names.suggestion("lama", known, "x") == "did you mean llama-3-8b?"
    assert close_names.suggestion("xxxx", known, "kernelwright models") == (
        "`kernelwright models` lists them"
    )
    for args in (["ops", "zzzz"], ["bench", "model", "foo"], ["inspect", "xxxx"]):
        result = invoke(*args)
        assert result.exit_code == 2
        assert "lists them" in words(result.output)
        assert "geglu" not in result.output
        assert "wan-1.3b" not in result.output


def test_configurations_may_be_separated_by_blanks_too():
    result = invoke("bench", "model", "ltx-video", "--config", "eager, foo")
    assert "no configuration 'foo'" in words(result.output)


def test_inspect_keeps_rows_apart_in_a_narrow_terminal(capsys):
    pytest.importorskip("diffusers")
    report = inspect(models.build("sdxl-unet", tiny=True, device="meta"))
    for columns in (60, 80, 120):
        Console(width=columns).print(Architecture(report))
        said = capsys.readouterr().out
        lines = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
        names = [name for name in lines if name and not name.startswith(("diffusers ", "torch "))]
        assert len(names) == len(set(names)) == len(report.lines)
        assert all(len(line) <= columns for line in said.splitlines())


def test_names_are_cut_in_the_middle_and_never_alike():
    names = ["blocks.*.attn1.norm_q", "blocks.*.attn1.norm_k", "blocks.*.attn2.norm_q", "rope"]
    cut = shortened(names, 14)
    assert len(set(cut)) == 4
    assert all(name.startswith("b") and "…" in name for name in cut[:3])
    assert cut[3] == "rope"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": ', "not valid JSON"),
        ("[]", "holds a list"),
        ('{"_class_name": "LTXVideoTransformer3DModel", "num_layers": "x"}', "no LTXVideoTrans"),
    ],
)
def test_an_error_of_a_broken_config_names_the_file(tmp_path, content, said):
    pytest.importorskip("diffusers")
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        models.load(tmp_path, device="meta")
    assert str(file) in str(error.value)


def test_a_warning_names_the_library_and_the_line_of_the_user():
    scope = {"__name__": "kernelwright.somewhere", "warn": warn}
    exec("def ours():\n    warn('rmsnorm: no kernel')", scope)
    library = {"__name__": "torch.nn.modules", "ours": scope["ours"]}
    exec("def call():\n    ours()", library)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        library["call"]()
    (found,) = seen
    assert str(found.message) == "kernelwright: rmsnorm: no kernel"
    assert found.filename == __file__


def test_rows_of_a_cpu_carry_the_caveat_and_what_ran_without_a_graph():
    row = {"model": "ltx-video", "config": "exact+graphs", "device": "cpu"}
    row |= {"graphs": ["0 graphs; 3 calls ran without one: inputs on cpu"]}
    said = [note.plain for note in models_table.notes([row])]
    assert said == [f"ltx-video exact+graphs: {row['graphs'][0]}", CAVEAT]
    assert models_table.notes([row | {"device": "cuda", "graphs": ["1 graph"]}]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU is told")
def test_generate_says_that_no_graph_was_made(tmp_path):
    pytest.importorskip("diffusers")
    runner, alone = CliRunner(), typer.Typer()
    alone.command()(video.generate)
    size = ["--tiny", "--num-frames", "9", "--height", "32", "--width", "32", "--steps", "2"]
    file = tmp_path / "v.gif"
    result = runner.invoke(alone, [*size, "--graphs", "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert "no CUDA graph was made" in words(result.output)
    assert CAVEAT in words(result.output)


def test_the_picture_of_the_demo_shows_the_difference(tmp_path):
    before = torch.rand(3, 3, 16, 24)
    other = before.clone()
    other[0, :, 0, 0] += 0.25
    assert demo_picture.compared(before, before)[0] == "none, every bit is the same"
    label, difference = demo_picture.compared(before, other)
    assert label.startswith("at most 0.25 of 1")
    assert difference.max() == 1
    file = tmp_path / "new" / "p.png"
    demo_picture.save(file, before, {"exact": before, "fused": other})
    picture = Image.open(file)
    # five labelled rows of two frames, enlarged
    times = (picture.width - 2 * demo_picture.MARGIN) // 48
    row = demo_picture.LABEL + 16 * times + demo_picture.MARGIN
    assert picture.height == demo_picture.MARGIN + 5 * row
    assert picture.getpixel((40, demo_picture.MARGIN + 2 * row + demo_picture.LABEL + 5)) == (
        0,
        0,
        0,
    )


def test_the_report_of_an_injection_is_not_cut_in_a_narrow_terminal(capsys):
    model = models.build("ltx-video", tiny=True, device="meta")
    Console(width=44).print(inspect(model))
    assert "…" not in capsys.readouterr().out
