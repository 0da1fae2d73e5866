"""Records the figures of README and docs on the GPU of this machine.

    python tools/record_results.py [NAME ...] [--out results/h200] [--within SECONDS] [--jobs N]
    python tools/record_results.py --list

Each name is a file under `--out`: `models/ltx-video`, or `models` for all of that folder;
`programs/ltx-video` is one in a folder beside it, `results/h200-programs`. Without names all are
recorded, the least recently recorded first. A measurement is started only if it should end
`--within` so many seconds, so that it can be continued on a machine that is lent for minutes; one
that takes three times as long as expected is stopped, and the next one starts. With `--jobs`, so
many build and compile side by side; one that takes times stops the others meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernelwright.measure import turns

TOOLS = Path(__file__).parent
PEERS = "eager,compile,compile+graphs"
TIERS = f"{PEERS},exact+graphs,fused+graphs,fp8+graphs"
# of models that are also in another folder: beside `--out`, where a row stands once
APART = ("fp8", "fp8-memory", "programs", "generation-programs")
SHARED = ("--device", "cuda")  # a command that is given none looks for a GPU that is idle
# a measurement is stopped after so many times its expected seconds; more if it waits for others
LATE, LATE_IN_TURNS = 3.0, 6.0


@dataclass(frozen=True)
class Measurement:
    """A command of kernelwright, or of a script beside this one, that writes one file."""

    name: str
    command: tuple[str, ...]
    seconds: float  # it took about this long on an H200 with a cold cache of kernels
    program: tuple[str, ...] = ("-m", "kernelwright")

    def arguments(self, out: Path) -> list[str]:
        return [*self.command, "--out", str(self.file(out))]

    def file(self, out: Path) -> Path:
        group, _, name = self.name.partition("/")
        if group in APART:
            return out.with_name(f"{out.name}-{group}") / f"{name}.json"
        return out / f"{self.name}.json"


# models of which a few layers stand for all: at full depth building them takes longer than timing
FEW_LAYERS = (
    *("flux2-dev", "ltx-2", "hunyuan-video-1.5", "cogvideox-5b", "qwen-image", "wan-2.2-14b"),
    *("gemma-3-12b", "sana-1.6b", "kandinsky5-lite", "mochi", "flux2-klein-9b", "chroma"),
    *("hunyuan-video", "z-image", "lumina2", "wan-2.2-5b", "auraflow", "flux2-klein-4b"),
    *("glm-4-9b", "phi-3-mini", "phi-4", "ltx-2.3", "gemma-4-31b"),
)
WHOLE = {
    "ltx-video": ("ltx-video",),
    "ltx-video-25f": ("ltx-video", "--frames", "25", "--height", "480", "--width", "704"),
    "ltx-video-161f": ("ltx-video", "--frames", "161"),
    **{n: (n,) for n in ("flux-dev", "sd3.5-medium", "wan-1.3b", "pixart", "dit-xl", "sdxl-unet")},
    **{n: (n,) for n in ("llama-3-8b", "qwen3-8b", "mistral-7b", "falcon-7b")},
}
# fp8 beside torchao's, with the latents of 30 steps: torch.compile takes a second or two for every
# block that torchao has quantised
EIGHT_BITS = ("ltx-video", "ltx-video-161f", "flux-dev", "sd3.5-medium", "wan-1.3b")
FP8_MEMORY = (*EIGHT_BITS, "wan-2.2-14b")
# models that have a recipe, by it and without it
BY_PROGRAMS = ("sd3.5-medium", "ltx-video", "pixart", "wan-1.3b", "flux-dev")
# language models whose layers run as programs, with their cache
GENERATING = ("gemma-3-12b", "phi-4", "glm-4-9b")
ONE = ("ltx-video", "--lora", "64", "--batch-size", "1")  # as people fine-tune it
TRAINED = {
    "ltx-video-lora": ONE,
    "ltx-video-lora-checkpointing": (*ONE, "--checkpointing"),
    "ltx-video-lora-batch-2": ("ltx-video", "--lora", "16"),
    # the backward of cuDNN's attention, PyTorch's choice, has crashed there without injection
    "flux-dev-lora": ("flux-dev", "--lora", "16", "--layers", "6", "--attention", "flash"),
    "llama-3-8b": ("llama-3-8b", "--layers", "8"),
}
TRAINED_AS = "eager,compile,exact,exact+graphs"


def measurements() -> Iterator[Measurement]:
    model, quick = ("bench", "model"), ("--seconds", "0.3", "--no-error")
    for name in FEW_LAYERS:
        command = (*model, name, "--layers", "4", "--config", TIERS, *quick)
        yield Measurement(f"few-layers/{name}", command, 45)
    for name, what in WHOLE.items():
        command = (*model, *what, "--config", f"exact,{TIERS}", "--seconds", "1")
        yield Measurement(f"models/{name}", command, 75)
    for name in EIGHT_BITS:
        command = (*model, *WHOLE[name], "--config", "eager,compile,fp8+graphs", "--seconds", "1")
        yield Measurement(f"fp8/{name}", (*command, "--peer", "torchao"), 200)
    for name in FP8_MEMORY:
        command = (*model, *WHOLE.get(name, (name,)), "--config", "eager,fp8+graphs", *quick)
        yield Measurement(f"fp8-memory/{name}", command, 40)
    for name in BY_PROGRAMS:
        configs = [
            f"{tier}{way}{graphs}"
            for tier, graphs in (
                ("exact", ""),
                *((t, "+graphs") for t in ("exact", "fused", "fp8")),
            )
            for way in ("", "+programs")
        ]
        command = (*model, name, "--config", ",".join(configs), *quick)
        yield Measurement(f"programs/{name}", command, 70)
    for name in ("flux2-dev", "ltx-2"):
        command = (*model, name, "--config", "eager,exact+graphs", *quick)
        yield Measurement(f"full-depth/{name}", command, 60)
    for name in ("ltx-video", "flux2-dev", "ltx-2"):
        both = ("--config", "eager,exact", "--first", "eager,exact")
        yield Measurement(f"first/{name}", (*model, name, *both, *quick), 110)
    for name, what in TRAINED.items():
        peers = ",liger" if name.startswith("llama") else ""
        command = ("bench", "train", *what, "--config", TRAINED_AS + peers, "--no-error")
        yield Measurement(f"training/{name}", (*command, "--seconds", "1"), 150)
    generate = ("bench", "generate", "llama-3-8b", "--new", "48")
    yield Measurement("generation/llama-3-8b", generate, 120)
    yield Measurement("generation/llama-3-8b-8", (*generate, "--batch", "8"), 120)
    yield Measurement("generation/llama-3-8b-2048", (*generate, "--prompt", "2048"), 120)
    by_programs = "exact,exact+programs,exact+graphs,exact+programs+graphs"
    yield Measurement("generation-programs/llama-3-8b", (*generate, "--config", by_programs), 90)
    for name in GENERATING:
        yield Measurement(f"generation/{name}", ("bench", "generate", name, "--new", "48"), 150)
    yield Measurement("fp8-attention", (), 40, (str(TOOLS / "time_fp8_attention.py"),))
    yield Measurement("calibration", ("doctor", "--exact"), 60)


def chosen(names: list[str], out: Path) -> list[Measurement]:
    """Those of these names or folders; what was never recorded first, then the oldest."""
    found = [m for m in measurements() if not names or m.name in names or _folder(m.name) in names]
    known = {name for m in measurements() for name in (m.name, _folder(m.name))}
    if unknown := sorted(set(names) - known):
        sys.exit(f"{', '.join(unknown)}: no such measurement; --list shows them")
    return sorted(found, key=lambda m: _recorded(m.file(out)))


def _folder(name: str) -> str:
    return name.partition("/")[0]


def _recorded(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def record(measurement: Measurement, out: Path, lock: Path | None = None) -> str:
    """Run one; what became of it, in a few words. With a `lock` in turns with others."""
    file = measurement.file(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = _recorded(file)
    command = [sys.executable, *measurement.program, *measurement.arguments(out)]
    if lock and measurement.command[:1] == ("bench",):
        command += SHARED
    # what a calibration in the background would find for this PyTorch and GPU is known
    environment, late = {**os.environ, "KERNELWRIGHT_CALIBRATE": "0"}, LATE
    if lock:
        environment, late = environment | in_turns(lock), LATE_IN_TURNS
    try:
        done = subprocess.run(
            command, check=False, timeout=late * measurement.seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return "stopped: it took too long"
    if _recorded(file) == before:
        return f"nothing recorded, exit {done.returncode}"
    rows = len(json.loads(file.read_text())["rows"])
    return f"{rows} rows" + (f", exit {done.returncode}" if done.returncode else "")


def in_turns(lock: Path) -> dict[str, str]:
    """What the environment of measurements that run side by side has besides."""
    # torch.compile's workers would go on while their parent is stopped
    return {turns.VARIABLE: str(lock), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def record_each(todo: list[Measurement], out: Path, within: float, jobs: int) -> None:
    end = time.monotonic() + within
    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor(jobs) as pool:
        lock = Path(file.name) if jobs > 1 else None

        def run(number: int, m: Measurement) -> None:
            if time.monotonic() + m.seconds > end:
                print(f"{m.name}: left for next time", flush=True)
                return
            print(f"[{number} of {len(todo)}] {m.name}, about {m.seconds:.0f} s", flush=True)
            start = time.monotonic()
            said = record(m, out, lock)
            print(f"{m.name}: {said}, {time.monotonic() - start:.0f} s", flush=True)
            if lock:  # one that was ended while it took times has left the others stopped
                with turns.locked(lock):
                    turns.send(signal.SIGCONT, turns.children(os.getpid()))

        for done in [pool.submit(run, number, m) for number, m in enumerate(todo, 1)]:
            done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file or folder under --out")
    parser.add_argument("--out", type=Path, default=Path("results/h200"), help="(results/h200)")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once (1)")
    parser.add_argument("--list", action="store_true", help="list the measurements and stop")
    given = parser.parse_args()
    todo = chosen(given.names, given.out)
    if given.list:
        for m in todo:
            called = Path(m.program[-1]).name
            print(f"{m.name:32} {m.seconds:4.0f} s  {called} {' '.join(m.command)}")
        return
    record_each(todo, given.out, given.within, given.jobs)


if __name__ == "__main__":
    main()
