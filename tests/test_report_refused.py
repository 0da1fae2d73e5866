"""What `kernelwright report` refuses, each in one line: other files, bad paths."""

import json

import pytest
from result_files import (
    MODELS,
    PROFILES,
    counted_row,
    invoked,
    model_row,
    op_row,
    video_row,
)

from kernelwright.commands.report import report
from kernelwright.report import Unreadable, read

invoke = invoked(report)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"kind": None}, "kind None is no name; known are models, training"),
        ({"rows": ["soup"]}, "no rows"),
        ({"rows": []}, "no rows"),
        ({"environment": None}, "no environment"),
        ({"rows": [{"model": "x"}]}, "row 1: 'sizes' is None"),
        ({"rows": [model_row("eager", ms=float("nan"))]}, "'ms' is nan, not a positive number"),
    ],
)
def test_what_is_no_result_file_is_refused_in_one_line(written, tmp_path, change, said):
    path = written("models", *MODELS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = invoke(path, "--html", tmp_path / "r.html")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert str(path) in result.output
    assert said in result.output
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no such file"), ("{", "not JSON"), ("[]", "has no schema")]
)
def test_missing_and_foreign_files_are_refused(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    result = invoke(path, "--html", tmp_path / "r.html")
    assert result.exit_code == 1
    assert f"{path}: {said}" in result.output


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(Unreadable, match=r"no \.json file"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("video", [video_row("eager", total_s=0)], "row 1: 'total_s' is 0, not a positive number"),
        ("video", [video_row("eager") | {"equal": None}], "'equal' is None, not true or false"),
        ("profile", [PROFILES[0] | {"kernels": None}], "'kernels' is None, not a list"),
        ("profile", [counted_row(us="fast")], "'us' is 'fast', not a number"),
    ],
)
def test_rows_that_say_nothing_are_refused(written, tmp_path, kind, rows, said):
    result = invoke(written(kind, *rows), "--html", tmp_path / "r.html")
    assert result.exit_code == 1
    assert said in result.output


def test_what_cannot_be_written_is_said_before_the_page_is_made(written, tmp_path):
    path = written("ops", op_row())
    for options in (["--html", f"{path}/r.html"], ["--html", tmp_path / "r.html", "--png", path]):
        result = invoke(path, *options)
        assert result.exit_code == 1
        assert "cannot be written" in result.output
    assert not (tmp_path / "r.html").exists()
