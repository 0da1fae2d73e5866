"""The tool that records all figures asks for measurements that exist."""

import sys
from pathlib import Path

import pytest
import typer

from kernelwright import models
from kernelwright.cli import app

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import record_results

    yield record_results
    sys.modules.pop("record_results")


def test_every_command_exists_with_its_options_and_presets(tool, tmp_path):
    main = typer.main.get_command(app)
    for m in tool.measurements():
        if m.program != ("-m", "kernelwright"):
            assert Path(*m.program).exists()
            continue
        command, words = main, m.arguments(tmp_path)
        if words[0] == "bench":
            words += tool.SHARED
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        given = command.make_context(m.name, words).params  # an unknown option is an error
        assert set(given.get("presets") or ()) <= set(models.presets())
        assert given["out"] == m.file(tmp_path)


def test_what_was_never_recorded_comes_first_and_unknown_names_are_refused(tool, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "ltx-video.json").write_text("{}")
    found = [m.name for m in tool.chosen(["models"], tmp_path)]
    assert found[-1] == "models/ltx-video"
    assert all(name.startswith("models/") for name in found)
    with pytest.raises(SystemExit, match="soup: no such measurement"):
        tool.chosen(["soup"], tmp_path)


# takes the place of `python -m kernelwright bench ... --out FILE`
STAND_IN = """#!{python} -IS
import json, sys, time
file = sys.argv[sys.argv.index("--out") + 1]
if "late" in file:
    time.sleep(60)
if "nothing" in file:
    sys.exit(3)
with open(file, "w") as out:
    json.dump({{"rows": [{{}}, {{}}]}}, out)
"""


def test_a_measurement_says_what_it_recorded_and_a_late_one_is_stopped(tool, tmp_path, monkeypatch):
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))

    def recorded(name, seconds=60):
        return tool.record(tool.Measurement(name, ("bench", "model", "dit-xl"), seconds), tmp_path)

    assert recorded("tiny") == "2 rows"
    assert recorded("nothing") == "nothing recorded, exit 3"
    assert recorded("late", 0.01) == "stopped: it took too long"


# notes when it takes times, and when it does something else
TIMES = """#!{python} -IS
import os, sys, time
sys.path.insert(0, {source!r})
file = sys.argv[sys.argv.index("--out") + 1]
import importlib.util
spec = importlib.util.spec_from_file_location("turns", {turns!r})
turns = importlib.util.module_from_spec(spec)
spec.loader.exec_module(turns)
turns.SETTLE, busy = 0.05, [True, False]
turns._is_busy = lambda: bool(busy) and busy.pop(0)  # the GPU works on after the first look
begin = time.monotonic()
while time.monotonic() < begin + 0.2:
    with open({log!r}, "a") as log:
        log.write(file + " works\\n")
    time.sleep(0.01)
with turns.alone():
    for _ in range(20):
        with open({log!r}, "a") as log:
            log.write(file + " times\\n")
        time.sleep(0.01)
    assert not busy
    if "killed" in file:
        os.kill(os.getpid(), 9)
with open(file, "w") as out:
    out.write('{{"rows": [1]}}')
"""


def test_those_that_run_side_by_side_take_times_alone(tool, tmp_path, monkeypatch, capsys):
    from kernelwright.measure import turns

    log, stand_in = tmp_path / "log", tmp_path / "python"
    source = {"source": str(tmp_path), "turns": turns.__file__, "log": str(log)}
    stand_in.write_text(TIMES.format(python=sys.executable, **source))
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    names = ("one", "killed", "two")
    tool.record_each([tool.Measurement(n, (), 60) for n in names], tmp_path, 100, jobs=3)
    said = capsys.readouterr().out
    assert said.count("1 rows") == 2
    assert "killed: nothing recorded" in said
    lines = [line.rsplit("/", 1)[1] for line in log.read_text().splitlines()]
    for name in names:
        timed = [i for i, line in enumerate(lines) if line == f"{name}.json times"]
        assert len(timed) == 20
        assert timed[-1] - timed[0] == 19  # no other did anything in between
