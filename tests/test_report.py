"""`kernelwright report` and `kernelwright compare`: what they show, refuse and exit with."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kernelwright.bench.results import SCHEMA
from kernelwright.commands.report import compare, report
from kernelwright.report import Unreadable, page, read
from kernelwright.report.charts import nice_step
from kernelwright.report.figures import devices, exact_sentence, lead, parts

MEASURED = Path(__file__).parents[1] / "results"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123456789abcdef",
    "command": "python -m kernelwright.bench.models",
}
BEFORE = {"GEMM": 40.0, "attention": 20.0, "fused": 0.0, "other": 30.0}
AFTER = {"GEMM": 39.0, "attention": 20.0, "fused": 6.0, "other": 5.0}

app = typer.Typer()
app.command()(report)
app.command()(compare)


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})


def model_row(config, ms=100.0, **more):
    row = {"model": "ltx-video", "tiny": False, "sizes": {"batch": 2, "frames": 49}}
    row |= {"dtype": "bfloat16", "config": config, "ms": ms, "equal": "fused" not in config}
    row |= {"error": 0.01, "first_s": 1.5, "peak_gib": 4.0} | more
    return row | ({} if config in ("eager", "compile") else {"replaced": 254})


def op_row(**more):
    gpu = {"eager": 80.0, "triton": 15.0, "exact:torch": 17.0, "exact:wan": 16.0, "compile": 20.0}
    row = {"op": "rmsnorm", "case": "ltx 2x2688x2048", "dtype": "bfloat16", "chosen": "triton"}
    row |= {"megabytes": 45.0, "copy_us": 12.0, "gpu_us": gpu, "host_us": dict.fromkeys(gpu, 9.0)}
    return row | more


def exact_row(**more):
    row = {"op": "rmsnorm", "chain": "torch", "dtype": "bfloat16", "width": 64, "rows": 4}
    return row | {"elements": 1000, "mismatches": 0} | more


MODELS = (model_row("eager"), model_row("exact", 80.0), model_row("compile", 90.0, equal=False))


@pytest.fixture
def written(tmp_path):
    def write(kind, *rows, name=None, **environment):
        path = tmp_path / (name or f"{kind}.json")
        content = {"schema": SCHEMA, "kind": kind, "environment": ENVIRONMENT | environment}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content | {"rows": list(rows)}))
        return path

    return write


class Outline(HTMLParser):
    """Tags that are open and never closed, addresses, and the cells of every table row."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.rows, self.tags = [], [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [v for k, v in attrs if k in ("href", "src")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_the_page_stands_alone_and_is_well_formed():
    text = page(read([MEASURED]))
    outline = Outline(text)
    assert outline.open == []
    assert outline.addresses == ["data:,"]
    assert "script" not in outline.tags
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_every_colour_that_is_used_is_defined():
    text = page(read([MEASURED]))
    style, body = text.split("</style>")
    used = set(re.findall(r"\b(?:fill|dot|back)-\w+", body))
    assert used
    assert used <= set(re.findall(r"\.((?:fill|dot|back)-\w+)", style))
    variables = set(re.findall(r"var\((--\w+)\)", style))
    light, dark = style.split("prefers-color-scheme: dark")
    for half in (light, dark):
        assert variables <= set(re.findall(r"(--\w+):", half))


def test_figures_of_the_files_are_on_the_page(written):
    rows = Outline(page(read([written("models", *MODELS), written("ops", op_row())]))).rows
    assert ["ltx-video 49 frames batch 2", "100.0", "1.25×=", "1.11×"] in rows
    assert ["exact", "equal", "80.0", "1.50", "4.0", "1.00e-02", "254"] in rows
    chosen = ["rmsnorm", "ltx 2x2688x2048", "triton", "15.0", "9.0", "3000", "80%"]
    assert [*chosen, "17.0", "20.0", "80.0", "5.33×"] in rows
    environment = next(r for r in rows if r[0] == "models.json")
    assert {"NVIDIA H200", "580.1", "2.11.0", "3.6.0", "01234567"} <= set(environment)


def test_text_of_a_file_is_never_markup(written):
    row = model_row("exact", problems=[{"module": "<img src=x>", "problem": "a & b"}])
    text = page(read([written("models", model_row("eager"), row, command="<script>")]))
    assert "&lt;img src=x&gt;: a &amp; b" in text
    assert {"img", "script"}.isdisjoint(Outline(text).tags)


def test_lead_takes_the_best_gain_whose_bits_are_equal(written):
    rows = [*MODELS, model_row("fused+graphs", 20.0), model_row("exact+compile", 30.0, equal=False)]
    sentences = lead(devices(read([written("models", *rows)])))
    best = "ltx-video 49 frames batch 2: 1.25× with the same bits (exact on NVIDIA H200)."
    assert sentences == [best, "Faster than torch.compile in 1 of 1."]


def test_lead_hides_neither_slow_nor_failed_runs(written):
    failed = {k: v for k, v in model_row("fused").items() if k not in ("ms", "equal")}
    rows = [*MODELS, model_row("exact+graphs", 125.0), failed | {"failed": "error 1"}]
    sentences = lead(devices(read([written("models", *rows)])))
    assert "Slower than eager: ltx-video exact+graphs 0.80×." in sentences
    assert "Failed: ltx-video fused." in sentences


def test_lead_claims_nothing_for_tiny_models_or_the_cpu(written):
    tiny = [row | {"tiny": True} for row in MODELS]
    for path in (written("models", *tiny), written("models", *MODELS, name="c.json", gpu=None)):
        assert "say nothing" in lead(devices(read([path])))[0]


def test_a_split_becomes_a_waterfall_and_its_absence_is_said(written):
    plain = page(read([written("models", *MODELS)]))
    assert "no split by kernel" in plain
    eager, exact = model_row("eager", split=BEFORE), model_row("exact", 80.0, split=AFTER)
    text = page(read([written("models", eager, exact)]))
    assert "no split by kernel" not in text
    for change in ("GEMM −1.0 ms", "attention +0.0 ms", "fused +6.0 ms", "other −25.0 ms"):
        assert f"<title>{change}</title>" in text
    assert "<title>no kernel 10.0 ms</title>" in text


def test_parts_of_a_step_add_up_to_it(written):
    (file,) = read([written("models", model_row("eager", split=BEFORE))])
    assert sum(parts(file.models[0]).values()) == pytest.approx(100.0)


def test_exactness_is_one_true_sentence(written):
    bare = exact_row(width=128, not_covered="no kernel")
    del bare["elements"], bare["mismatches"]
    path = written("exact", exact_row(), exact_row(rows=8, mismatches=3), bare)
    (device,) = devices(read([path]))
    assert exact_sentence(device) == (
        "2 sizes of 1 exact modes, 2,000 elements compared with eager on NVIDIA H200: "
        "3 mismatches; 1 sizes have no exact kernel."
    )
    assert 'class="bad">2 sizes' in page(read([path]))


def test_gpus_and_files_are_kept_apart(written):
    first = written("models", *MODELS, name="one.json")
    again = written("models", *MODELS, name="two.json", commit="fedcba9876543210")
    other = written("models", *MODELS, name="a100.json", gpu="NVIDIA A100")
    h200, a100 = devices(read([first, again, other]))
    assert [len(d.models) for d in (h200, a100)] == [2, 1]
    assert len({m.title for m in h200.models}) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"kind": "soup"}, "kind 'soup' is unknown; known are models, ops, exact"),
        ({"rows": []}, "no rows"),
        ({"environment": None}, "no environment"),
        ({"rows": [{"model": "x"}]}, "row 1: 'sizes' is None"),
        ({"rows": [model_row("eager", ms=float("nan"))]}, "'ms' is nan, not a positive number"),
    ],
)
def test_what_is_no_result_file_is_refused_in_one_line(written, tmp_path, change, said):
    path = written("models", *MODELS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = invoke("report", path, "--html", tmp_path / "r.html")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert str(path) in result.output
    assert said in result.output
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no such file"), ("{", "not JSON"), ("[]", "names no schema")]
)
def test_missing_and_foreign_files_are_refused(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    for command in (["report", path, "--html", tmp_path / "r.html"], ["compare", path, path]):
        result = invoke(*command)
        assert result.exit_code == 1
        assert f"{path}: {said}" in result.output


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(Unreadable, match=r"no \.json file"):
        read([tmp_path])


def test_a_run_compared_with_itself_has_no_change():
    result = invoke("compare", MEASURED, MEASURED)
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
    result = invoke("compare", old, written("models", MODELS[0], new, MODELS[2]))
    assert result.exit_code == code, result.output
    assert said in result.output


def test_compare_matches_ops_by_way_and_exact_rows_by_size(written):
    old = [written("ops", op_row(), name="old/o.json"), written("exact", exact_row())]
    slower = op_row(gpu_us=op_row()["gpu_us"] | {"triton": 18.0})
    new = written("ops", slower, name="new/o.json")
    result = invoke("compare", old[0], new, "--json")
    (change,) = json.loads(result.output)["changes"]
    assert result.exit_code == 1
    assert change["row"] == "rmsnorm ltx 2x2688x2048 bfloat16 triton"
    assert change["percent"] == pytest.approx(20.0)
    assert invoke("compare", old[0], new, "--threshold", "25").exit_code == 0
    wrong = written("exact", exact_row(mismatches=1), name="wrong.json")
    assert invoke("compare", old[1], wrong).exit_code == 1
    assert invoke("compare", wrong, old[1]).exit_code == 0


def test_compare_refuses_rows_it_cannot_match(written):
    ops = written("ops", op_row())
    assert "no row in common" in invoke("compare", ops, written("exact", exact_row())).output
    twice = invoke("compare", written("ops", op_row(), op_row(), name="twice.json"), ops)
    assert twice.exit_code == 1
    assert "twice; give one of them" in twice.output


def test_compare_says_when_the_machine_changed(written):
    old = written("models", *MODELS, name="old.json")
    rows = [model_row("eager", 110.0), *MODELS[1:]]
    result = invoke("compare", old, written("models", *rows, gpu="NVIDIA A100"))
    assert "not the same GPU: NVIDIA H200 before, NVIDIA A100 now" in result.output
    assert "eager itself changed" in result.output


def test_png_without_matplotlib_says_what_to_install(written, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = written("ops", op_row())
    result = invoke("report", path, "--html", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 1
    assert "pip install 'kernelwright[bench]'" in result.output


def test_png_draws_each_chart(written, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [model_row("eager", split=BEFORE), model_row("exact", 80.0, split=AFTER)]
    files = [written("models", *rows), written("ops", op_row())]
    result = invoke("report", *files, "--html", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 0, result.output
    drawn = sorted(p.name for p in (tmp_path / "png").iterdir())
    assert drawn == [f"{n}-nvidia-h200.png" for n in ("roofline", "speedup", "steps")]


@pytest.mark.parametrize("rough", [0.003, 1.0, 1.2, 740.0, 999.0])
def test_steps_of_an_axis_are_round(rough):
    step = nice_step(rough)
    assert rough * 0.999 <= step <= rough * 2.51
    assert f"{step:.0e}"[0] in "125"


FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="report.html" width="WIDTH" height="844" style="border: 0"></iframe>
<title></title><script>onload = () => {
  const page = frames[0]
  document.title = JSON.stringify([page.document.documentElement.scrollWidth, page.innerWidth,
    page.getComputedStyle(page.document.body).backgroundColor])
}</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_in_a_browser(tmp_path, width, scheme):
    """No word in the console, nothing wider than the window, and the colours of the scheme."""
    target = tmp_path / "report.html"
    assert invoke("report", MEASURED, "--html", target).exit_code == 0
    # a frame as wide as the screen: a window of its own may not be that narrow
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--window-size=1400,900", "--dump-dom"]
    options += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    done = subprocess.run(
        [CHROMIUM, *options, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert title
    content, window, paper = json.loads(title[1].replace("&quot;", '"'))
    assert content <= width
    assert window == width
    assert paper == ("rgb(22, 22, 20)" if scheme == "dark" else "rgb(251, 250, 248)")
