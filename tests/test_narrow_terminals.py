"""Tables and pages fit a terminal of 80 columns, and lose no column and no word there."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kernelwright import catalog, doctor, models
from kernelwright.bench import generation_table, models_table
from kernelwright.cli import app
from kernelwright.commands.wide_tables import parts, show, width
from kernelwright.docstring_lines import wrapped

WIDE = Console(width=80)
CONFIGS = ("eager", "compile+graphs", "exact+graphs+compile")


def generated():
    common = {"tokens_per_s": 123.4, "ms": 12.34, "first_token_ms": 24.8, "first_s": 0.2}
    common |= {"sizes": {"batch_size": 1}, "tokens_equal": True, "equal": False}
    return generation_table.table(
        [common | {"model": m, "config": c} for m in ("llama-3-8b", "qwen3-8b") for c in CONFIGS]
    )


def forwards():
    split = {"GEMM": 25.0, "attention": 9.0, "fused": 2.0, "other": 1.0}
    common = {"ms": 616.2, "first_s": 10.2, "peak_gib": 17.2, "equal": False, "differing": 0.5}
    common |= {"error": 0.01, "split": split, "sizes": {}, "psnr": 40.1, "cold_s": 9.1}
    return models_table.table(
        [common | {"model": "hunyuan-video-1.5", "config": c} for c in CONFIGS]
    )


def shown(table):
    console = Console(width=80, file=io.StringIO())
    for part in parts(table, console):
        console.print(part)
    return console.file.getvalue()


@pytest.mark.parametrize("made", [generated, forwards])
def test_a_wide_table_is_printed_in_parts_that_fit(made):
    table = made()
    assert width(table, WIDE) > 80
    text = shown(table)
    assert all(len(line) <= 80 for line in text.splitlines())
    for column in table.columns:
        assert all(word in text for word in str(column.header).split() if word != "model")
        assert all(str(cell) in text for cell in column.cells)


def test_a_pipe_gets_full_lines(capsys):
    show(generated())
    assert "first token ms" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["models"], ["ops", "rmsnorm"], ["inspect", "flux-dev"]])
def test_a_page_fits_80_columns(command):
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "…" not in result.stdout


def test_sizes_of_presets_are_width_then_height_as_in_the_tables():
    for preset in models.presets().values():
        sizes = preset.sizes
        if "height" in sizes and "×" in preset.what:
            assert f"{sizes['width']}×{sizes['height']}" in preset.what


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda e: e.name)
def test_a_wrapped_docstring_has_the_same_words(entry):
    assert wrapped(entry.doc, 60).split() == entry.doc.split()
    examples = [line for line in entry.doc.splitlines() if line.startswith(">>>")]
    assert all(line in wrapped(entry.doc, 60).splitlines() for line in examples)


def test_doctor_names_each_op_once():
    chains = ["geglu (torch)", "modulate (diffusers)", "modulate (wan)"]
    assert doctor._by_op(chains) == "geglu (torch), modulate (diffusers, wan)"
