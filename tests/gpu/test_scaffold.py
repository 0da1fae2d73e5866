"""A kernel that `kernelwright new` makes passes `kernelwright check` on a GPU as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plugged import environment, paths

from kernelwright.scaffold import KINDS, LANGUAGES, create

SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_new_kernel_is_good_on_a_gpu(language, kind, tmp_path):
    name = f"gpu_{language}_{kind.replace('-', '_')}"
    created = create(name, language, kind, tmp_path / "op")
    done = subprocess.run(
        [sys.executable, "-m", "kernelwright", "check", name, "--target", "sm_90", "--json"],
        env=environment(SOURCES, *paths(created)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["verdict"] == "good"
    parts = {part["name"]: part for part in report["parts"]}
    assert parts["gpu"]["summary"].endswith(f"hold, {language} on the GPU")
    times = [row["gpu_us"] for row in parts["benchmark"]["rows"]]
    assert len(times) == 2
    assert all(us[language] > 0 and us["eager"] > 0 for us in times)
