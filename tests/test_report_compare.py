"""`kernelwright compare`: regressions and improvements between two runs, and exit codes."""

import json

import pytest
from result_files import (
    MEASURED,
    MODELS,
    PROFILES,
    VIDEOS,
    counted_row,
    exact_row,
    invoked,
    model_row,
    op_row,
    video_row,
)

from kernelwright.commands.report import compare

invoke = invoked(compare)


def test_a_run_compared_with_itself_has_no_change():
    result = invoke(MEASURED, MEASURED)
    assert result.exit_code == 0
    assert "0 worse, 0 better" in result.output


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        (model_row("exact", 82.3), 0, "0 worse, 0 better"),
        (model_row("exact", 82.5), 1, "+3.1%"),
        (model_row("exact", 60.0), 0, "-25.0%"),
        (model_row("exact", 80.0, peak_gib=5.0), 1, "+25.0%"),
        (model_row("exact", 80.0, equal=False), 1, "no longer equal"),
        (model_row("exact", 80.0, failed="not the bits"), 1, "not the bits"),
        (model_row("fused", 80.0), 1, "lost"),
    ],
)
def test_compare_exits_with_1_on_a_regression(written, new, code, said):
    old = written("models", *MODELS, name="old.json")
    result = invoke(old, written("models", MODELS[0], new, MODELS[2]))
    assert result.exit_code == code, result.output
    assert said in result.output


def test_compare_counts_rows(written):
    """A row with several changes counts once, and rows that one run lacks are counted apart."""
    old = written("models", *MODELS, model_row("fp8", 50.0), name="old.json")
    worse = model_row("exact", 90.0, peak_gib=9.0)
    new = [MODELS[0], worse, model_row("compile", 45.0, equal=False), model_row("fused", 70.0)]
    result = invoke(old, written("models", *new), "--json")
    found = json.loads(result.output)
    counts = {name: found[name] for name in ("rows", "worse", "better", "lost", "added")}
    assert counts == {"rows": 3, "worse": 1, "better": 1, "lost": 1, "added": 1}
    told = "3 rows compared: 1 worse, 1 better, 1 within 3%; 1 only in OLD; 1 only in NEW"
    assert told in invoke(old, written("models", *new)).output


def test_compare_matches_ops_by_way_and_exact_rows_by_size(written):
    old = [written("ops", op_row(), name="old/o.json"), written("exact", exact_row())]
    slower = op_row(gpu_us=op_row()["gpu_us"] | {"triton": 18.0})
    new = written("ops", slower, name="new/o.json")
    result = invoke(old[0], new, "--json")
    (change,) = json.loads(result.output)["changes"]
    assert result.exit_code == 1
    assert change["row"] == "rmsnorm ltx 2x2688x2048 bfloat16 triton"
    assert change["percent"] == pytest.approx(20.0)
    assert invoke(old[0], new, "--threshold", "25").exit_code == 0
    wrong = written("exact", exact_row(mismatches=1), name="wrong.json")
    assert invoke(old[1], wrong).exit_code == 1
    assert invoke(wrong, old[1]).exit_code == 0


def test_compare_refuses_rows_it_cannot_match(written):
    ops = written("ops", op_row())
    assert "no row in common" in invoke(ops, written("exact", exact_row())).output
    twice = invoke(written("ops", op_row(), op_row(), name="twice.json"), ops)
    assert twice.exit_code == 1
    assert "twice; give one of them" in twice.output


def test_compare_matches_rows_of_several_pytorches_each_with_its_own(written):
    for run, ms in (("old", 80.0), ("new", 82.0)):
        written("models", model_row("exact", ms), name=f"{run}/a.json", torch="2.11.0")
        folder = written("models", model_row("exact", 70.0), name=f"{run}/b.json", torch="2.15.0")
    said = json.loads(
        invoke(folder.parents[1] / "old", folder.parent, "--threshold", "1", "--json").output
    )
    assert (said["rows"], said["worse"], said["lost"]) == (2, 1, 0)


def test_compare_says_when_the_machine_changed(written):
    old = written("models", *MODELS, name="old.json")
    rows = [model_row("eager", 110.0), *MODELS[1:]]
    result = invoke(old, written("models", *rows, gpu="NVIDIA A100"))
    assert "not the same GPU: NVIDIA H200 before, NVIDIA A100 now" in result.output
    assert "eager itself changed" in result.output


def test_compare_holds_videos_and_profiles_against_each_other(written):
    old = [written("video", *VIDEOS), written("profile", *PROFILES, counted_row())]
    for path in old:
        assert "0 worse, 0 better" in invoke(path, path).output
    slower = written("video", *VIDEOS[:2], video_row("exact+graphs", 2.5), VIDEOS[3], name="v.json")
    result = invoke(old[0], slower, "--json")
    assert result.exit_code == 1
    changes = {c["what"]: c for c in json.loads(result.output)["changes"]}
    assert changes["total s"]["percent"] == pytest.approx(25.0)
    assert changes["total s"]["row"] == "video ltx-video 49f 768×512, 30 steps exact+graphs"
    noisy = written("video", VIDEOS[0], video_row("eager again", 9.0), *VIDEOS[2:], name="n.json")
    assert invoke(old[0], noisy).exit_code == 0
    longer = written("profile", *PROFILES, counted_row(us=40.0), name="p.json")
    result = invoke(old[1], longer)
    assert result.exit_code == 1
    assert "kernelwright_row (5376, 1, 1)" in result.output


def test_compare_refuses_another_schema(written, tmp_path):
    path = written("ops", op_row())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    result = invoke(path, other)
    assert result.exit_code == 1
    assert f"{other}: schema 99" in result.output
