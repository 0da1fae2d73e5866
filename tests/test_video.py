"""`kernelwright generate` and `kernelwright bench video`, with a tiny LTX-Video on the CPU."""

import dataclasses
import json

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from kernelwright.commands.video import bench_video, generate
from kernelwright.errors import BadSetting, CannotRun
from kernelwright.report import page, read
from kernelwright.video import compare, run, source, ways, write
from kernelwright.video.settings import Settings

av = pytest.importorskip("av")
pytest.importorskip("diffusers")

SMALL = Settings(frames=9, height=32, width=64, steps=3)
SMALL_OPTIONS = ("--tiny", "--device", "cpu", "--height", "32", "--width", "64", "--steps", "3")

app = typer.Typer()
app.command("generate")(generate)
app.command("bench")(bench_video)


def invoke(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "80"})


def made(*args):
    """The JSON output of a command."""
    result = invoke(*args, *SMALL_OPTIONS, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def played(path):
    """Frames [frames, height, width, 3] of a file, and its frames per second."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(stream)]
        return torch.stack(frames), stream.average_rate


@pytest.fixture(scope="module")
def pipe():
    return source.pipeline(None, tiny=True, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def compiled_blocks(monkeypatch):
    """The blocks given to torch.compile, which traces them without the slow C++ compiler."""
    blocks = []
    compile_module = nn.Module.compile

    def traced(self):
        blocks.append(type(self).__name__)
        compile_module(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", traced)
    return blocks


def test_generate_writes_a_video_that_plays(tmp_path):
    path = tmp_path / "new folder" / "boat.mp4"
    result = invoke("generate", *SMALL_OPTIONS, "--output", path, "--gif", "--fps", 20)
    assert result.exit_code == 0, result.output
    for word in ("exact", "total", "a step", "a frame", "gave the same", str(path)):
        assert word in result.output
    frames, rate = played(path)
    assert frames.shape == (9, 32, 64, 3)
    assert rate == 20
    assert len(played(path.with_suffix(".gif"))[0]) == 9
    assert {p.name for p in path.parent.iterdir()} == {"boat.mp4", "boat.gif"}


def test_options_combine(tmp_path, compiled_blocks):
    options = ["--use-optimized-kernels", "--numerics", "fused", "--graphs", "--compile"]
    options += ["--batch-size", 2, "--seed", 7, "--guidance-scale", 1, "--warmup-iterations", 1]
    options += ["--prompt", "a cat", "--negative-prompt", "a dog", "--output", tmp_path / "cat.gif"]
    told = made("generate", *options)
    assert told["run"] == "fused+graphs+compile"
    assert told["replaced"] > 0
    assert "inputs on cpu" in told["graphs"][0]
    assert set(compiled_blocks) == {"LTXVideoTransformerBlock"}
    assert told["files"] == [str(tmp_path / f"cat-{n}.gif") for n in (1, 2)]
    first, second = (played(path)[0] for path in told["files"])
    assert not torch.equal(first, second)


def test_without_kernels_nothing_is_injected(tmp_path):
    told = made("generate", "--no-optimized-kernels", "--output", tmp_path / "a.gif")
    assert told["run"] == "eager"
    assert "replaced" not in told
    parts = told["text_s"] + told["denoise_s"] + told["decode_s"]
    assert told["total_s"] == pytest.approx(parts)
    assert told["frame_s"] == pytest.approx(told["total_s"] / 9)
    assert 0 < told["step_s"] < told["denoise_s"]


def test_weights_come_from_a_folder(tmp_path):
    other = source.models.ltx_pipeline(tiny=True, dtype=torch.float32, seed=5)
    other.save_pretrained(tmp_path / "weights")
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    loaded = source.pipeline(str(tmp_path / "weights"), **cpu)
    expected = run.generate(other, SMALL).latents
    assert torch.equal(run.generate(loaded, SMALL).latents, expected)
    with pytest.raises(BadSetting, match="has random weights"):
        source.pipeline(str(tmp_path / "weights"), tiny=True, **cpu)
    with pytest.raises(BadSetting, match="is a FluxTransformer2DModel, expected an LTXPipeline"):
        source.pipeline("flux-dev", **cpu)
    with pytest.raises(BadSetting, match="is not a preset, a folder with a model"):
        source.pipeline("no such folder", **cpu)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_run_gives_what_the_pipeline_gives(pipe, guidance):
    settings = dataclasses.replace(SMALL, guidance_scale=guidance)
    steps = []
    found = run.generate(pipe, settings, lambda: steps.append(1))

    def direct(output_type):
        return pipe(
            prompt=settings.prompt,
            negative_prompt=settings.negative_prompt,
            num_frames=9,
            height=32,
            width=64,
            num_inference_steps=3,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(settings.seed),
            output_type=output_type,
        ).frames

    assert torch.equal(found.latents, direct("latent"))
    pixels = torch.from_numpy(direct("np"))
    assert torch.equal(found.frames, (pixels * 255).round().byte())
    assert len(steps) == 3
    assert len(found.steps_s) == 2


def test_a_way_is_undone(pipe, compiled_blocks):
    before = run.generate(pipe, SMALL).latents
    with ways.Way("exact", graphs=True, compiled=True).applied(pipe) as report:
        assert report.replaced > 0
        assert any(m._compiled_call_impl for m in pipe.transformer.modules())
    assert not any(m._compiled_call_impl for m in pipe.transformer.modules())
    assert not any("forward" in vars(m) for m in pipe.transformer.modules())
    assert torch.equal(run.generate(pipe, SMALL).latents, before)


def test_bench_compares_with_eager_and_keeps_the_result(tmp_path):
    out, output = tmp_path / "results" / "video.json", tmp_path / "boat.mp4"
    options = ["--config", "exact,fused", "--warmup-iterations", 1, "--out", out]
    result = invoke("bench", *SMALL_OPTIONS, *options, "--output", output)
    assert result.exit_code == 0, result.output
    kept = json.loads(out.read_text())
    assert kept["kind"] == "video"
    assert kept["environment"]["torch"] == torch.__version__
    assert kept["settings"]["frames"] == 9
    eager, again, exact, fused = kept["rows"]
    names = ["eager", compare.CONTROL, "exact", "fused"]
    assert [row["config"] for row in kept["rows"]] == names
    for row in (eager, again, exact):
        assert row["equal"] is True
        assert row["psnr_db"] is None
    assert not fused["equal"]
    assert fused["psnr_db"] > 100  # float32 against float32
    assert eager["speedup"] == 1
    for row in (again, exact, fused):
        assert row["speedup"] == pytest.approx(eager["total_s"] / row["total_s"])
        assert row["config"] in result.output
    assert exact["replaced"] > 0
    (file,) = read([out])  # `report` reads the file
    assert [row.config for row in file.video] == names
    assert file.environment.device == "CPU"
    assert "ltx-video tiny 9f 64×32 float32, 3 steps" in page([file])
    videos = [f"boat-{name}.mp4" for name in ("eager", "exact", "fused")]
    assert sorted(p.name for p in tmp_path.glob("*.mp4")) == videos
    assert all(len(played(tmp_path / video)[0]) == 9 for video in videos)
    assert (tmp_path / videos[0]).read_bytes() == (tmp_path / videos[1]).read_bytes()


def test_bench_takes_one_configuration_from_options():
    told = made("bench", "--numerics", "fused", "--graphs", "--warmup-iterations", 0)
    assert [row["config"] for row in told["rows"]] == ["eager", compare.CONTROL, "fused+graphs"]
    result = invoke("bench", *SMALL_OPTIONS, "--config", "exact", "--compile")
    assert result.exit_code == 2
    assert "not both" in result.output


@pytest.fixture(scope="module")
def eager_run(pipe):
    return run.generate(pipe, SMALL)


@pytest.fixture
def disturbed(monkeypatch, eager_run):
    """Every measurement returns the same run, for some with changed latents."""

    def disturb(when, change):
        count = iter(range(10))

        def measured(pipe, settings, way, show):
            found = eager_run
            if when(next(count), way):
                found = dataclasses.replace(found, latents=change(found.latents))
            return run.Measured(way, found, 0.0, None)

        monkeypatch.setattr(compare, "measure", measured)

    return disturb


def test_wrong_bits_have_no_time(disturbed, tmp_path):
    disturbed(lambda n, way: way.numerics == "exact", lambda latents: latents * 1.001)
    out = tmp_path / "video.json"
    options = ["--config", "exact", "--warmup-iterations", 0, "--out", out]
    result = invoke("bench", *SMALL_OPTIONS, *options)
    assert result.exit_code == 1
    row = json.loads(out.read_text())["rows"][-1]
    assert row["failed"] == "not the bits of eager"
    assert "total_s" not in row
    assert 40 < row["psnr_db"] < 100
    assert "exact: not the bits of eager" in result.output


def test_latents_that_are_not_finite_have_no_time(disturbed, pipe):
    disturbed(lambda n, way: way.numerics == "fused", lambda latents: latents / 0)
    row = compare.compare(pipe, SMALL, [ways.Way("fused")])[-1]
    assert row["failed"] == "latents not finite"
    assert row["psnr_db"] is None
    json.dumps(row, allow_nan=False)


def test_eager_must_be_finite_to_compare_with(disturbed, pipe):
    disturbed(lambda n, way: n == 0, lambda latents: latents * float("nan"))
    with pytest.raises(CannotRun, match="not finite"):
        compare.compare(pipe, SMALL, [])


def test_bits_are_not_asked_for_where_eager_does_not_repeat_itself(disturbed, pipe):
    disturbed(lambda n, way: n > 0, lambda latents: latents * 1.001)
    rows = compare.compare(pipe, SMALL, [ways.Way("exact")])
    assert not any("failed" in row for row in rows)
    assert "Two runs of eager differ" in compare.remarks(rows)[0]


def test_psnr_is_over_the_range_of_eager():
    eager = torch.tensor([0.0, 1.0, 2.0, 4.0])
    # an error of 0.04 everywhere, 1 / 100 of the range: 40 dB
    assert compare.against(eager + 0.04, eager)["psnr_db"] == pytest.approx(40, abs=1e-4)
    assert compare.against(eager.clone(), eager) == {"equal": True, "psnr_db": None}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-frames", "50"], "49 or 57"),
        (["--num-frames", "0"], "expected 8k + 1: 1"),
        (["--height", "500"], "480 or 512"),
        (["--width", "31"], "multiple of 32: 32"),
        (["--steps", "1"], "2 or more"),
        (["--batch-size", "0"], "1 or more"),
        (["--fps", "0"], "1 or more"),
        (["--seed", "-1"], "0 or more"),
        (["--warmup-iterations", "-1"], "0 or more"),
        (["--prompt", " "], "empty"),
        (["--numerics", "fp4"], "expected exact, fused or fp8"),
        (["--no-optimized-kernels", "--graphs"], "add exact or fused"),
        (["--no-optimized-kernels", "--numerics", "exact"], "turned off"),
        (["--device", "gpu"], "cannot be used"),
        (["--device", "meta"], "expected cuda"),
        (["--dtype", "int8"], "expected one of bfloat16"),
        (["--output", "video.avi"], "ends in .mp4 or .gif"),
        (["--output", f"{__file__}/video.mp4"], "cannot be written"),
        (["--model", "flux-dev"], "leave --model or --tiny out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_wrong_option_is_named_before_any_work(command, options, says, monkeypatch):
    monkeypatch.setattr(run, "generate", None)
    result = CliRunner().invoke(app, [command, "--tiny", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert next(o for o in reversed(options) if o.startswith("--")) in result.output


@pytest.mark.parametrize("config", ["exact+fused", "quick", "exact+exact", "eager+compile", ""])
def test_an_unknown_configuration_is_refused(config):
    with pytest.raises(BadSetting, match="expected eager, or any of exact"):
        ways.parse_ways(config)


def test_configurations_are_named_as_they_are_parsed():
    names = "eager,compile,exact,exact+graphs,fused,fused+graphs,fused+compile,exact+graphs+compile"
    assert ",".join(map(str, ways.parse_ways(names))) == names
    assert [str(way) for way in ways.parse_ways("fused, fused")] == ["eager", "fused"]
    with pytest.raises(BadSetting, match="add exact or fused"):
        ways.parse_ways("compile+graphs")


def test_a_result_file_that_cannot_be_written_stops_the_work_before_it_starts(monkeypatch):
    monkeypatch.setattr(run, "generate", None)
    result = invoke("bench", *SMALL_OPTIONS, "--out", f"{__file__}/video.json")
    assert result.exit_code == 2
    assert "--out" in result.output


def test_without_pyav_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(write, "installed", lambda module: module != "av")
    result = invoke("generate", *SMALL_OPTIONS, "--output", tmp_path / "a.mp4")
    assert result.exit_code == 1
    assert "pip install 'kernelwright[video]'" in result.output
    write.check_output(tmp_path / "a.gif")


def test_frames_keep_their_colours_and_order(tmp_path):
    frames = torch.zeros(4, 32, 64, 3, dtype=torch.uint8)
    for number, channel in enumerate((0, 1, 2, 0)):
        frames[number, ..., channel] = 255
    for name in ("a.mp4", "a.gif"):
        write.write_video(tmp_path / name, frames, 10)
        shown, rate = played(tmp_path / name)
        assert rate == 10
        assert torch.equal(shown.argmax(-1), frames.argmax(-1))


def test_a_video_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"the one before")

    def breaks(part, frames, fps):
        part.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(write, "_mp4", breaks)
    with pytest.raises(OSError, match="disk full"):
        write.write_video(path, torch.zeros(1, 32, 32, 3, dtype=torch.uint8), 25)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"the one before"]
