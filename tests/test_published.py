"""Result files record their environment, and the tables of README.md are generated from them."""

import json
import subprocess

import pytest
from result_files import MODELS, VIDEOS, exact_row, model_row, write_results

from kernelwright.errors import BadSetting
from kernelwright.measure import results
from kernelwright.report import readme_tables


def readme(tmp_path, *sections):
    path = tmp_path / "README.md"
    marks = (f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in sections)
    path.write_text("# before\n" + "".join(marks) + "after\n")
    return path


def test_tables_stand_between_the_markers_that_are_there(tmp_path):
    folder = tmp_path / "results" / "h200"
    sizes = {"batch": 2, "frames": 49, "height": 512, "width": 768, "text": 128}
    rows = [row | {"sizes": sizes} for row in (*MODELS, model_row("exact+graphs", 50.0))]
    write_results(folder / "models", "models", *rows)
    path = readme(tmp_path, "models")
    readme_tables.update(path, tmp_path / "results")
    text = path.read_text()
    line = (
        "| `ltx-video` 49f 768×512 batch 2 | 100.0 | 90.0 (1.11×) | 80.0 (1.25×) = | 50.0 (2.00×) ="
    )
    assert line in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, random weights, commit 0123456" in text
    assert text.startswith("# before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    readme_tables.update(path, tmp_path / "results")
    assert path.read_text() == text


def test_a_model_measured_at_two_depths_is_shown_by_the_run_with_more_configurations(tmp_path):
    folder = tmp_path / "results" / "h200" / "few-layers"
    deep = [row | {"sizes": {"tokens": 64, "layers": 6}} for row in MODELS[:2]]
    flat = [row | {"sizes": {"tokens": 64, "layers": 3}} for row in MODELS]
    write_results(folder, "models", *deep, *flat)
    path = readme(tmp_path, "few-layers")
    readme_tables.update(path, tmp_path / "results")
    assert "64 tokens 3 layers" in path.read_text()
    assert "6 layers" not in path.read_text()


def of(name, *rows):
    return [row | {"model": name} for row in rows]


def figures_of(tmp_path, section, models, few_layers=MODELS):
    folder = tmp_path / "results" / "h200"
    write_results(folder / "models", "models", *models)
    write_results(folder / "few-layers", "models", *few_layers)
    path = readme(tmp_path, section)
    readme_tables.update(path, tmp_path / "results")
    return path.read_text()


def test_the_lead_is_the_median_of_the_models_that_have_all_columns(tmp_path):
    graphs = "exact+graphs"

    def measured(name, exact, compiled):
        return of(name, *(model_row(c, ms) for c, ms in (("eager", 100.0), *exact, *compiled)))

    rows = [
        *measured("dit-xl", [(graphs, 10.0)], [("compile", 20.0)]),
        *measured("flux-dev", [(graphs, 80.0)], [("compile", 100.0)]),
        *measured("sdxl-unet", [(graphs, 1.0)], []),
        *measured("ltx-video", [(graphs, 50.0)], [("compile", 62.5)]),
    ]
    text = figures_of(tmp_path, "lead", rows)
    assert "| speed-up over eager | median of 3 models | LTX-Video 49f batch 2 |" in text
    assert "| **`exact` with CUDA graphs, bit-identical** | 2.00× | 2.00× |" in text
    assert "| torch.compile | 1.60× | 1.60× |" in text
    assert "with CUDA graphs |" not in text  # it was not timed


def test_fp8_stands_beside_its_peer_and_the_control(tmp_path):
    rows = [
        model_row("eager", steady_reserved_gib=10.0),
        model_row("compile", 80.0, psnr=60.04),
        model_row("fp8+graphs", 40.0, error=0.0596, psnr=49.5, steady_reserved_gib=6.2),
        model_row("torchao+compile", 62.5, error=0.0647, psnr=48.5),
        model_row("torchao+compile+graphs", 50.0, error=0.0647),
    ]
    more = of("flux-dev", model_row("eager"), model_row("fp8+graphs", 50.0, error=0.06))
    text = figures_of(tmp_path, "fp8", [*rows, *more])
    speed, errors = "2.50× | 2.00×", "1.0% | 1.0% | 6.0% | 6.5%"
    latents = "60.0 dB | 49.5 dB | 48.5 dB"
    assert f"| `ltx-video` 49f batch 2 | {speed} | {errors} | {latents} | 0.62× |" in text
    assert "| 2.00× | – | 1.0% | – | 6.0% | – | – | – | – | – |" in text
    beside = [model_row("eager"), model_row("fp8+graphs", 25.0, error=0.05)]
    write_results(tmp_path / "results" / "h200-fp8", "models", *beside)
    readme_tables.update(tmp_path / "README.md", tmp_path / "results")
    assert "| `ltx-video` 49f batch 2 | 4.00× | – |" in (tmp_path / "README.md").read_text()


def test_the_main_table_begins_with_ltx_video_and_has_one_size_of_each_model(tmp_path):
    small = [row | {"sizes": {"frames": 25}} for row in MODELS[:2]]
    rows = [*of("dit-xl", *MODELS), *small, *MODELS, *of("falcon-7b", *MODELS)]
    text = figures_of(tmp_path, "main", rows)
    names = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert names == ["ltx-video", "dit-xl", "falcon-7b"]
    assert "25f" not in text


def test_the_error_of_fp8_stands_beside_that_of_eager(tmp_path):
    diffusion = of("flux-dev", model_row("eager"), model_row("fp8+graphs", 50.0, error=0.06))
    language = of("llama", model_row("eager", error=0.08), model_row("fp8+graphs", error=0.5))
    ltx = [model_row("eager", error=0.02), model_row("fp8+graphs", error=0.07)]
    text = figures_of(tmp_path, "fp8-error", [*diffusion, *language, *ltx])
    assert (
        "6.0% to 7.0% in diffusion models (2 measured), where eager is off by 1.0% to 2.0%" in text
    )
    assert "50.0% in language models (1 measured), where eager is off by 8.0%" in text


def test_what_is_slower_than_eager_and_than_torch_compile_is_listed(tmp_path):
    slow = of(
        "sdxl-unet", model_row("eager"), model_row("exact", 200.0), model_row("compile", 90.0)
    )
    text = figures_of(tmp_path, "slower", [*MODELS, *slow])
    eager, compiled = text.split("\n\n")
    assert "*Slower than eager:* `sdxl-unet` 49f batch 2 `exact` 0.50×." in eager
    assert "best:* `sdxl-unet` 49f batch 2 200.0 against 90.0 ms." in compiled
    assert "ltx-video" not in text


def test_videos_have_a_table_too(tmp_path):
    write_results(tmp_path / "results" / "h200" / "videos", "video", *VIDEOS)
    path = readme(tmp_path, "videos")
    readme_tables.update(path, tmp_path / "results")
    title = "ltx-video 49f 768×512, 30 steps"
    assert f"| {title} | exact+graphs | 2.0 | 46.7 | 40.8 | 1.50× | same bits |" in path.read_text()
    assert f"| {title} | compile | 2.4 | 60.0 | 49.0 | 1.25× | 38.2 dB |" in path.read_text()


def test_what_was_seen_of_each_pytorch_has_a_line(tmp_path):
    folder = tmp_path / "results" / "h200"
    write_results(folder, "exact", exact_row(elements=3_000_000), exact_row(elements=1_000_000))
    write_results(folder / "models", "models", model_row("exact", 80.0), model_row("compile"))
    row = {"compared": 2_000_000, "differing": 0}
    with_quack = {"torch": "2.15.0", "packages": ["nvidia-cutlass-dsl 4.8.0"]}
    calibrated = [
        row | {"subject": "F.rms_norm", "way": "QuACK"},
        row | {"subject": "silu", "way": "ATen"},
        row | {"subject": "exp", "way": None, "differing": 7},
    ]
    write_results(folder, "calibration", *calibrated, **with_quack)
    write_results(folder / "2.15", "models", model_row("exact", 80.0), **with_quack)
    path = readme(tmp_path, "pytorch")
    readme_tables.update(path, tmp_path / "results")
    text = path.read_text()
    assert "| 2.11.0 | NVIDIA H200 | 4 million | 0 | 1 of 1 | – | – |" in text
    newer = "2.15.0 with nvidia-cutlass-dsl 4.8.0"
    assert f"| {newer} | NVIDIA H200 | 4 million | 0 | 1 of 1 | F.rms_norm: QuACK | exp |" in text


def test_a_result_file_names_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELWRIGHT_COMMIT", "abc")
    monkeypatch.setattr(results.sys, "orig_argv", ["python", "/home/me/bin/kernelwright", "bench"])
    results.write(tmp_path / "new" / "r.json", "ops", [{"op": "rmsnorm"}], peers={"liger": "0.8"})
    kept = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (kept["schema"], kept["kind"], kept["peers"]) == (1, "ops", {"liger": "0.8"})
    assert kept["rows"] == [{"op": "rmsnorm"}]
    known = kept["environment"]
    assert known.keys() >= {"gpu", "driver", "torch", "triton", "commit", "date"}
    assert known["commit"] == "abc"
    assert known["command"] == "python kernelwright bench"


def test_the_commit_is_that_of_this_source_only(tmp_path, monkeypatch):
    """A package installed into a folder of somebody else's repository has no commit."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    (tmp_path / "results.py").write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert results._commit() is None
    subprocess.run([*git, "add", "results.py"], check=True)
    assert results._commit() == results._output(*git, "rev-parse", "HEAD") is not None


def test_a_file_that_could_not_be_written_is_refused_by_its_option(tmp_path):
    with pytest.raises(BadSetting, match="it is a folder") as refused:
        results.check_writable(tmp_path, "--save")
    assert refused.value.option == "--save"
    results.check_writable(tmp_path / "new" / "a.json")
    assert list((tmp_path / "new").iterdir()) == []
