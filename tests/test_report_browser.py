"""The report in a real browser: Debian's chromium, headless. `make pytest` fetches it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from result_files import (
    AFTER,
    BEFORE,
    MEASURED,
    PROFILES,
    VIDEOS,
    counted_row,
    model_row,
    write_results,
)

from kernelwright.report import page, read

PLACES = os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", "")])
CHROMIUM = shutil.which("chromium", path=PLACES) or shutil.which("chromium-browser", path=PLACES)
PAPER = {"dark": "rgb(22, 22, 20)", "light": "rgb(251, 250, 248)"}
SCHEMES = {"dark": 0, "light": 1}

# an iframe of the screen's width: a window cannot be that narrow
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="report.html" width="WIDTH" height="844" style="border: 0"></iframe>
<title></title><script>onload = () => {
  const page = frames[0], all = query => [...page.document.querySelectorAll(query)]
  all("details").forEach(fold => fold.open = true)
  document.title = JSON.stringify({
    content: page.document.documentElement.scrollWidth,
    window: page.innerWidth,
    paper: page.getComputedStyle(page.document.body).backgroundColor,
    flat: all("svg.bar rect").filter(bar => !bar.getBoundingClientRect().height).length,
    bars: all("svg.bar rect").length,
    // the first column stays where it is when the others move
    loose: all(".scroll").filter(box => {
      box.scrollLeft = 9999
      const column = box.querySelector("td").getBoundingClientRect().left
      const moved = Math.abs(column - box.getBoundingClientRect().left) > 1
      box.scrollLeft = 0
      return moved
    }).length,
    wide: all(".scroll").filter(box => box.scrollWidth > box.clientWidth).length,
    shaded: all(".scroll").filter(box =>
      page.getComputedStyle(box).backgroundImage.includes("gradient")).length,
    ragged: all("td.figure").filter(cell =>
      page.getComputedStyle(cell).textAlign != "right" ||
      !page.getComputedStyle(cell).fontVariantNumeric.includes("tabular-nums")).length,
    hidden: all(".scroll").filter(box => {
      const first = box.querySelector("td")
      return first.getBoundingClientRect().width > box.getBoundingClientRect().width * 0.7
    }).length,
  })
}</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page with the recorded results and every other kind of row."""
    folder = tmp_path_factory.mktemp("report")
    rows = [model_row("eager", split=BEFORE), model_row("exact", 80.0, split=AFTER)]
    long = counted_row(name="void at::native::vectorized_elementwise_kernel<4, Binary>" * 2)
    files = [
        write_results(folder, "models", *rows),
        write_results(folder, "video", *VIDEOS),
        write_results(folder, "profile", *PROFILES, counted_row(), long),
    ]
    (folder / "report.html").write_text(page(read([MEASURED, *files])))
    return folder


def test_the_set_up_never_fails_for_want_of_chromium(tmp_path):
    """If none can be downloaded it says so in one line; if one is installed it does nothing."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "rm").symlink_to(shutil.which("rm"))
    command = [shutil.which("sh"), Path(__file__).with_name("get_chromium.sh"), tmp_path]

    def set_up():
        return subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True)

    done = set_up()
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert "will skip" in done.stdout
    (tools / "chromium").symlink_to(shutil.which("true"))
    done = set_up()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: tests/get_chromium.sh .venv fetches one")
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1280, "dark")])
def test_the_page_opens_in_a_browser(folder, width, scheme):
    """No console output, nothing hidden or wider than the window, the colours of the scheme."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    options += ["--window-size=1400,900", "--dump-dom"]
    options += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    done = subprocess.run(
        [CHROMIUM, *options, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"HOME": str(folder)},
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title
    seen = json.loads(title[1].replace("&quot;", '"'))
    assert seen["window"] == width
    assert seen["content"] <= width
    assert seen["paper"] == PAPER[scheme]
    assert seen["bars"] > 100
    assert seen["flat"] == 0
    assert seen["hidden"] == 0
    assert seen["loose"] == 0
    assert seen["shaded"] >= seen["wide"] > 0
    assert seen["ragged"] == 0
