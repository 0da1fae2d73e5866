"""`kernelwright report`: the content of the page and the charts, and refused files."""

import html
import re
import sys
from html.parser import HTMLParser

import pytest
from result_files import (
    AFTER,
    BEFORE,
    MEASURED,
    MODELS,
    PROFILES,
    VIDEOS,
    counted_row,
    exact_row,
    invoked,
    model_row,
    op_row,
    profile_row,
    video_row,
)

from kernelwright.commands.report import report
from kernelwright.measure.cpu_caveat import CAVEAT
from kernelwright.report import page, read
from kernelwright.report.charts import nice_step
from kernelwright.report.figures import devices
from kernelwright.report.sentences import exact_sentence, lead

invoke = invoked(report)


class Outline(HTMLParser):
    """Unclosed tags, URLs, and the cells of every table row."""

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


def test_every_colour_that_is_used_is_defined(written):
    more = [written("video", *VIDEOS), written("profile", *PROFILES)]
    text = page(read([MEASURED, *more]))
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
    assert ["ltx-video 49f batch 2", "100.0", "1.25×=", "–", "1.11×", "–"] in rows
    assert ["exact", "equal", "80.0", "1.50", "–", "–", "4.0", "1.00e-02", "254"] in rows
    chosen = ["rmsnorm", "ltx 2x2688x2048", "triton", "15.0", "9.0", "3000", "80%"]
    assert [*chosen, "17.0", "80.0 (5.33×)", "20.0 (1.33×)"] in rows
    environment = next(r for r in rows if r[0] == "models.json")
    assert {"NVIDIA H200", "580.1", "2.11.0", "3.6.0", "01234567"} <= set(environment)


def test_peers_and_wrong_answers_of_ops_are_on_the_page(written):
    us = op_row()["gpu_us"] | {"liger": 30.0}
    row = op_row(gpu_us=us, over={"eager": 5.3, "liger": 2.0}, failed={"cuda": "fell back"})
    row["error"] = {"triton": 0.0016}
    files = read([written("ops", row)])
    rows = Outline(page(files)).rows
    assert "liger µs" in next(r for r in rows if r[0] == "op")
    assert (
        next(r for r in rows if r[:3] == ["rmsnorm", row["case"], "triton"])[-1] == "30.0 (2.00×)"
    )
    assert next(r for r in rows if r[3:4] == ["triton"] and r[2] == "bfloat16")[-1] == "1.60e-03"
    assert "rmsnorm ltx 2x2688x2048 bfloat16, cuda: fell back" in page(files)
    assert "Failed: rmsnorm ltx 2x2688x2048." in lead(devices(files))


def test_ops_that_ran_on_the_cpu_have_their_wall_time(written):
    row = op_row(gpu_us={}, host_us={}, wall_us={"torch": 30.0, "eager": 60.0}, chosen="torch")
    rows = Outline(page(read([written("ops", row, gpu=None)]))).rows
    assert ["torch", "30.0", "–", "1500"] in [r[2:6] for r in rows]


def test_a_configuration_that_is_not_here_did_not_fail(written):
    bare = {k: v for k, v in model_row("fp8").items() if k not in ("ms", "equal")}
    absent = bare | {"failed": "no fp8 on this GPU", "unavailable": True}
    exact = model_row("exact", 80.0, cold_s=9.5, warm_s=1.2)
    text = page(read([written("models", MODELS[0], exact, absent)]))
    assert "Failed" not in text
    assert "fp8: no fp8 on this GPU" in text
    assert ["exact", "equal", "80.0", "1.50", "9.50", "1.20"] in [r[:6] for r in Outline(text).rows]


def test_a_video_is_compared_way_by_way(written):
    text = page(read([written("video", *VIDEOS)]))
    rows = Outline(text).rows
    eager = next(row for row in rows if row[0] == "eager")
    assert eager[1:6] == ["3.00", "1.00×", "–", "80.0", "61.2"]
    assert eager[6:] == ["0.10", "2.40", "0.50", "9.5", "1.0"]
    exact = next(row for row in rows if row[0] == "exact+graphs")
    assert exact[1:4] == ["2.00", "1.50×", "same bits"]
    assert next(row for row in rows if row[0] == "compile")[3] == "38.2 dB"
    assert "ltx-video 49f 768×512, 30 steps" in text
    assert "<title>denoise 1.4 s</title>" in text
    assert "Random weights, guidance 3." in text
    assert "Eager against itself, the control: the same bits." in text
    assert 'class="lead">A whole video, ltx-video 49f 768×512, 30 steps: 2.0 s, 1.50×' in text


def test_a_video_hides_neither_a_wrong_way_nor_an_eager_that_does_not_repeat_itself(written):
    wrong = {"config": "exact", "equal": False, "psnr_db": 55.0, "failed": "not the bits of eager"}
    again = video_row("eager again", equal=False, psnr_db=61.0)
    text = page(read([written("video", VIDEOS[0], again, wrong)]))
    assert "the control: 61.0 dB; no way can be asked for its bits." in text
    assert ["exact", "wrong", "–", "55.0 dB"] in [row[:4] for row in Outline(text).rows]
    assert "exact: not the bits of eager" in text
    assert "Failed: ltx-video exact." in text


def test_a_profile_shows_the_step_before_and_after_by_category(written):
    compiled = profile_row("compile", {"GEMM": 26.0}, 30.0, graph_breaks={"breaks": 2})
    text = page(read([written("profile", *PROFILES, compiled)]))
    for change in ("norm −2.0 ms", "modulation −17.0 ms", "no kernel +4.0 ms"):
        assert f"<title>{change}</title>" in text
    assert "One step, eager to exact" in text
    rows = Outline(text).rows
    assert ["modulation", "17.00", "0.00", "0.00"] in rows
    assert ["no kernel", "10.00", "14.00", "4.00"] in rows
    assert ["graph breaks", "–", "–", "2"] in rows
    assert ["kernelwright_row", "norm", "–", "4.00 (3)", "4.00 (3)"] in rows
    assert '<strong class="kernel">kernelwright_row</strong>' in text


def test_counters_of_ncu_are_a_table_and_advice_is_given_once(written):
    rows = [counted_row(), counted_row(grid="(2, 1, 1)", us=None, limiter=None)]
    text = page(read([written("profile", *rows)]))
    cells = ["kernelwright_row", "exact", "(5376, 1, 1)", "28", "36.3", "4224", "88%", "31%"]
    assert [*cells, "82% of 100%", "registers"] in Outline(text).rows
    assert text.count("at the speed of memory") == 1
    assert "kernelwright_row (5376, 1, 1), kernelwright_row (2, 1, 1): at the speed" in text


def test_a_video_on_the_cpu_claims_nothing(written):
    (device,) = devices(read([written("video", *VIDEOS, gpu=None)]))
    assert device.name == "CPU"
    assert "say nothing" in lead([device])[0]
    assert not any("whole video" in sentence for sentence in lead([device]))


def test_a_kind_that_the_page_does_not_know_is_a_table_of_its_rows(written):
    rows = [{"op": "rmsnorm", "host_us": {"triton": 4.25, "hub": 3.0}}, {"op": "<b>", "n": 2}]
    text = page(read([written("calls", *rows), written("ops", op_row())]))
    shown = Outline(text).rows
    assert ["op", "host_us triton", "host_us hub", "n"] in shown
    assert ["rmsnorm", "4.25", "3", "–"] in shown
    assert ["<b>", "–", "–", "2"] in [[html.unescape(c) for c in row] for row in shown]
    assert "<h3>Calls</h3>" in text


def test_text_of_a_file_is_never_markup(written):
    row = model_row("exact", problems=[{"module": "<img src=x>", "problem": "a & b"}])
    text = page(read([written("models", model_row("eager"), row, command="<script>")]))
    assert "&lt;img src=x&gt;: a &amp; b" in text
    assert {"img", "script"}.isdisjoint(Outline(text).tags)


def test_lead_takes_the_best_gain_whose_bits_are_equal(written):
    rows = [*MODELS, model_row("fused+graphs", 20.0), model_row("exact+compile", 30.0, equal=False)]
    sentences = lead(devices(read([written("models", *rows)])))
    best = "ltx-video 49f batch 2: 1.25× with the same bits (exact on NVIDIA H200)."
    assert sentences == [best, "Faster than torch.compile at its best in 1 of 1."]


def test_lead_begins_with_the_median_of_the_models(written):
    small = [model_row("eager", 10.0, model="dit-xl"), model_row("exact", 1.0, model="dit-xl")]
    first, second, *_ = lead(devices(read([written("models", *MODELS, *small)])))
    assert first.startswith("Median of 2 models")
    assert second.startswith("ltx-video")


def test_torch_compile_counts_at_its_best(written):
    rows = [*MODELS, model_row("compile+graphs", 1.0)]
    sentences = lead(devices(read([written("models", *rows)])))
    told = "Faster than torch.compile at its best in 0 of 1, not in ltx-video 49f batch 2."
    assert sentences[-1] == told


def test_lead_leaves_loops_with_a_cache_out(written):
    """A cache skips steps: what has the bits of the cached loop does not have eager's."""
    loop = {"sizes": {"frames": 49, "batch": 2, "steps": 12}}
    rows = [*MODELS, model_row("eager", 1000.0, **loop), model_row("exact+cache", 100.0, **loop)]
    files = read([written("models", *rows)])
    assert not any("10.00×" in sentence for sentence in lead(devices(files)))
    text = page(files)
    assert "<h3>Denoising loops</h3>" in text
    assert ["ltx-video 49f batch 2 12 steps", "1000.0", "10.00×="] in Outline(text).rows


def test_a_model_counts_once_in_the_median(written):
    """At its largest, so that three sizes of one model do not outweigh another model."""
    rows = [*MODELS]
    for frames, ms in ((9, 10.0), (17, 20.0)):
        sizes = {"sizes": {"frames": frames}}
        rows += [model_row("eager", ms, **sizes), model_row("exact", ms / 10, **sizes)]
    rows += [model_row("eager", 10.0, model="dit-xl"), model_row("exact", 5.0, model="dit-xl")]
    first = lead(devices(read([written("models", *rows)])))[0]
    assert first == "Median of 2 models, each at its fastest with the same bits: 1.62×."


def test_a_family_has_its_goal_and_its_peers(written):
    sizes = {"sizes": {"frames": 49, "width": 768, "height": 512, "batch": 2}}
    rows = [model_row(c, ms, **sizes) for c, ms in (("eager", 165.0), ("exact+graphs", 100.0))]
    rows += [model_row("compile+graphs", 99.0, equal=False, **sizes)]
    rows += [model_row("eager", 10.0, model="llama-3-8b")]
    text = page(read([written("models", *rows)]))
    assert text.index("<h4>Video models</h4>") < text.index("<h4>Language models</h4>")
    assert "0 of 1 that were timed beside it are, not ltx-video 49f 768×512 batch 2" in text
    assert "Of the goals set for single models 1 of 1 are reached." in text
    assert "Peers: torch.compile as a CUDA graph." in text


def test_text_generation_and_calibration_have_their_sections(written):
    sizes = {"batch_size": 1, "prompt": 128, "new_tokens": 96}
    row = {"model": "llama-3-8b", "tiny": False, "sizes": sizes, "dtype": "bfloat16"}
    row |= {"tokens_equal": True, "equal": True, "first_call_s": 2.0}
    eager = row | {"config": "eager", "ms": 20.0, "tokens_per_s": 50.0, "first_token_ms": 30.0}
    exact = row | {"config": "exact", "ms": 10.0, "tokens_per_s": 100.0, "first_token_ms": 25.0}
    subject = {"subject": "F.rms_norm", "way": None, "chains": ["rmsnorm torch"]}
    subject |= {"compared": 4096, "differing": 7}
    varying = exact | {"config": "fused", "tokens_equal": False, "equal": False}
    varying |= {"eager_repeats": False}
    timed = written("generation", varying, exact, eager)
    files = read([timed, written("calibration", subject, packages=["quack 1.0"])])
    text = page(files)
    rows = Outline(text).rows
    assert [r[0] for r in rows if r[-1] in ("same", "eager varies")] == ["eager", "fused", "exact"]
    assert rows[[r[0] for r in rows].index("fused")][-2:] == ["eager varies", "eager varies"]
    assert "<h4>llama-3-8b, 128 tokens of prompt, 96 new</h4>" in text
    assert ["exact", "100.0", "10.00", "2.00×", "25.0", "2.0", "same", "same"] in rows
    assert ["F.rms_norm", "no kernel: runs eager", "rmsnorm torch", "4,096", "7"] in rows
    assert "with quack 1.0" in text


def test_a_page_of_cpu_times_says_so(written):
    assert CAVEAT in page(read([written("models", *MODELS, gpu=None)]))
    assert CAVEAT not in page(read([written("models", *MODELS)]))


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
    rows = model_row("eager", split=BEFORE), model_row("exact", 80.0, split=AFTER)
    ((model,),) = (device.models for device in devices(read([written("models", *rows)])))
    for step in model.steps:
        assert sum(step.parts.values()) == pytest.approx(step.ms)


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


def test_png_without_matplotlib_says_what_to_install(written, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = written("ops", op_row())
    result = invoke(path, "--html", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 1
    assert "pip install 'kernelwright[bench]'" in result.output


def test_png_draws_each_chart(written, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [model_row("eager", split=BEFORE), model_row("exact", 80.0, split=AFTER)]
    files = [written("models", *rows), written("ops", op_row())]
    files += [written("video", *VIDEOS), written("profile", *PROFILES)]
    result = invoke(*files, "--html", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 0, result.output
    drawn = sorted(p.name for p in (tmp_path / "png").iterdir())
    names = ("profile", "roofline", "speedup", "steps", "video")
    assert drawn == [f"{n}-nvidia-h200.png" for n in names]


@pytest.mark.parametrize("rough", [0.003, 1.0, 1.2, 740.0, 999.0])
def test_steps_of_an_axis_are_round(rough):
    step = nice_step(rough)
    assert rough * 0.999 <= step <= rough * 2.51
    assert f"{step:.0e}"[0] in "125"
