"""One generation, timed: text, every denoising step, and the decoding of the frames."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..calibration import background
from ..inject import Report
from ..progress import Show, show_nothing
from .settings import MIN_STEPS, Settings
from .ways import Way

# published values for autoencoders with timestep conditioning (LTX-Video 0.9.1 and newer); the
# others ignore them
DECODE = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@dataclass(frozen=True, eq=False)
class Run:
    """The output of one generation, and its times in seconds.

    frames is [videos, frames, height, width, 3] in 0..255, latents the last step's; both on the
    CPU. `steps_s` omits the first step, whose time includes the work before the loop.
    """

    frames: Tensor
    latents: Tensor
    total_s: float
    text_s: float
    denoise_s: float
    decode_s: float
    steps_s: tuple[float, ...]
    memory: dict[str, float]

    def times(self) -> dict[str, float]:
        """The figures of a row."""
        videos, frames = self.frames.shape[:2]
        return {
            "total_s": self.total_s,
            "step_s": statistics.median(self.steps_s),
            "frame_s": self.total_s / (videos * frames),
            "text_s": self.text_s,
            "denoise_s": self.denoise_s,
            "decode_s": self.decode_s,
            **self.memory,
        }


@dataclass(frozen=True, eq=False)
class Measured:
    """A run, its configuration, the seconds of injection and warm-up, and injection's report."""

    way: Way
    run: Run
    ready_s: float
    report: Report | None

    def notes(self) -> dict[str, Any]:
        """What injection replaced, and what stayed eager."""
        if self.report is None:
            return {}
        told = self.report.to_dict()
        return {key: told[key] for key in ("replaced", "problems", "graphs")}


def measure(pipe: Any, settings: Settings, way: Way, show: Show = show_nothing) -> Measured:
    """Run a pipeline one way: warm-up iterations of few steps, then the timed run."""
    _let_go()
    short = dataclasses.replace(settings, steps=MIN_STEPS)
    begin = time.perf_counter()
    with way.applied(pipe) as report:
        for _ in range(settings.warmup_iterations):
            generate(pipe, short, show(f"{way}, warming up", short.steps))
        ready = time.perf_counter() - begin
        background.wait()
        run = generate(pipe, settings, show(str(way), settings.steps))
    return Measured(way, run, ready, report)


@torch.no_grad()
def generate(pipe: Any, settings: Settings, after_step: Callable[[], None] | None = None) -> Run:
    """From prompt to frames."""
    device = pipe.transformer.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    clock = _Clock(device)
    last: dict[str, Tensor] = {}

    def step_done(pipe: Any, index: int, step: Any, given: dict[str, Any]) -> dict[str, Any]:
        clock.mark()
        if index == settings.steps - 1:
            last.update(given)
        if after_step is not None:
            clock.wait_for_the_mark_before()
            after_step()
        return given

    clock.mark()
    text = _encoded(pipe, settings)
    clock.mark()
    video = pipe(
        **text,
        num_frames=settings.frames,
        height=settings.height,
        width=settings.width,
        frame_rate=settings.fps,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        generator=torch.Generator().manual_seed(settings.seed),
        output_type="pt",
        callback_on_step_end=step_done,
        callback_on_step_end_tensor_inputs=["latents"],
        **DECODE,
    ).frames
    clock.mark()
    text_s, first, *steps, decode = clock.seconds()
    return Run(
        frames=_bytes(video),
        latents=last["latents"].cpu(),
        total_s=text_s + first + sum(steps) + decode,
        text_s=text_s,
        denoise_s=first + sum(steps),
        decode_s=decode,
        steps_s=tuple(steps),
        memory=_memory(device),
    )


def _encoded(pipe: Any, settings: Settings) -> dict[str, Any]:
    """The pipeline's arguments for the encoded prompts."""
    positive, mask, negative, negative_mask = pipe.encode_prompt(
        prompt=settings.prompt,
        negative_prompt=settings.negative_prompt,
        do_classifier_free_guidance=settings.guidance_scale > 1,
        num_videos_per_prompt=settings.batch,
        device=pipe.transformer.device,
    )
    return {
        "prompt_embeds": positive,
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_attention_mask": negative_mask,
    }


class _Clock:
    """Time marks; on a GPU they are events on its stream, so that a mark does not synchronise."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def wait_for_the_mark_before(self) -> None:
        """Let the progress bar run one step ahead of the GPU, so that the GPU never idles."""
        if self._device.type == "cuda":
            self._marks[-2].synchronize()

    def seconds(self) -> list[float]:
        """Seconds between each mark and the next."""
        if self._device.type != "cuda":
            return [b - a for a, b in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._marks)]


def _bytes(video: Tensor) -> Tensor:
    """[videos, frames, channels, height, width] in 0..1 -> [..., height, width, channels]"""
    return (video.float().clamp(0, 1) * 255).round().byte().movedim(2, -1).cpu()


def _memory(device: torch.device) -> dict[str, float]:
    """Peak memory of tensors, and peak memory reserved by the allocator, graphs included."""
    if device.type != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def _let_go() -> None:
    """Free the memory of the previous way, which would count as this one's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
