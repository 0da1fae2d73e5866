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
