"""Times `generate` of language models: eager, injected, as graphs, compiled, with Liger.

A cache of fixed size ("static") and one that grows ("dynamic", transformers' default) use other
attention kernels, so they differ in bits. Each configuration is compared with the un-injected run
that has the same cache: "exact" must give its tokens and the bits of its logits, unless a second
un-injected run has others: cuDNN's attention of one token with thousands adds in any order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import models, place
from ..calibration import background
from ..close_names import suggestion
from ..errors import BadSetting, CannotRun
from ..measure import results
from ..measure.configs import configured, tier_of
from ..measure.results import environment_of
from ..measure.timing import wait
from .liger_kernels import liger
from .models import Wrong, _fresh, _memory, _reason

DYNAMIC, STATIC = "dynamic", "static"
# for each configuration the one for `configured`, its cache, and whether transformers compiles it
CONFIGS: Mapping[str, tuple[str, str, bool]] = {
    "eager": ("eager", DYNAMIC, False),
    "eager+static": ("eager", STATIC, False),
    "compile": ("eager", STATIC, True),
    "liger": ("eager", DYNAMIC, False),
    **{
        f"{tier}{way}{graphs}": (f"{tier}{way}{graphs}", STATIC if graphs else DYNAMIC, False)
        for tier in ("exact", "fused", "fp8")
        for way in ("", "+programs")
        for graphs in ("", "+graphs")
    },
}
PRESETS = (
    *("llama-3-8b", "mistral-7b", "qwen3-8b", "gemma-3-12b", "gemma-4-31b", "phi-4"),
    *("phi-3-mini", "glm-4-9b"),
)


class Generation:
    """Greedy generation from one prompt of random words, always of the same length."""

    def __init__(self, model: Any, batch: int, prompt: int, new: int) -> None:
        self.model, self.new = model, new
        size = model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(0)
        self.words = torch.randint(3, size, (batch, prompt), generator=draw).to(model.device)

    def __call__(self, cache: str, compiles: bool, tokens: int, logits: bool = False) -> Any:
        """The tokens; with `logits` an object with those, too."""
        how: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        if logits:
            how |= {"return_dict_in_generate": True, "output_logits": True}
        if cache == STATIC:
            how |= {"cache_implementation": STATIC, "disable_compile": not compiles}
        return self.model.generate(
            input_ids=self.words,
            attention_mask=torch.ones_like(self.words),
            do_sample=False,
            pad_token_id=0,
            **how,
        )


def measure(
    preset: str,
    configs: Sequence[str],
    *,
    batch: int = 1,
    prompt: int = 128,
    new: int = 96,
    tiny: bool = False,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
    layers: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One row a configuration: milliseconds a token after the first, to the first token, and
    seconds to the first result of all."""
    model = models.build(preset, tiny=tiny, device=device, dtype=dtype, layers=layers)
    generation = Generation(model, batch, prompt, new)
    depth = {} if layers is None else {"layers": layers}
    expected: dict[str, Any] = {}
    with torch.no_grad():
        for config in configs:
            row: dict[str, Any] = {
                "model": preset,
                "tiny": tiny,
                "sizes": {"batch_size": batch, "prompt": prompt, "new_tokens": new, **depth},
                "dtype": str(dtype).removeprefix("torch."),
                "config": config,
            }
            try:
                row |= _measure(generation, config, expected, seconds)
            except CannotRun as no:
                row |= {"failed": str(no), "unavailable": True}
            except Exception as error:
                row["failed"] = str(error) if isinstance(error, Wrong) else _reason(error)
            yield row


def _measure(
    generation: Generation, config: str, expected: dict[str, Any], seconds: float
) -> dict[str, Any]:
    name, cache, compiles = CONFIGS[config]
    if cache not in expected:
        expected[cache] = _kept(generation(cache, False, generation.new, logits=True))
        again = _kept(generation(cache, False, generation.new, logits=True))
        expected["repeats " + cache] = _compared(again, expected[cache])["equal"]
    repeats = expected["repeats " + cache]
    _fresh()
    with ExitStack() as stack:
        begin = time.perf_counter()
        if config == "liger":
            stack.enter_context(liger(generation.model))
        _, report = configured(generation.model, name, stack)
        generation(cache, compiles, 1)
        wait()
        row: dict[str, Any] = {"first_s": time.perf_counter() - begin, "error": None}
        for _ in range(2):  # graphs are captured in the first, and must be right in the second
            got = _kept(generation(cache, compiles, generation.new, logits=True))
            row |= _compared(got, expected[cache])
            row["eager_repeats"] = repeats
            if tier_of(name) == "exact" and repeats and not row["equal"]:
                raise Wrong(f"{config}: not the bits of eager with a {cache} cache")
        row["first_call_s"] = time.perf_counter() - begin
        if report is not None:
            row["replaced"] = report.replaced
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = report.graph_lines
        _fresh()
        want = expected[cache][0] if tier_of(name) == "exact" and repeats else None
        first, each = _seconds(generation, config, cache, compiles, want, seconds)
        row |= {"ms": 1e3 * each, "first_token_ms": 1e3 * first}
        row["tokens_per_s"] = len(generation.words) / each
        return row | _memory("steady_")


def _kept(result: Any) -> tuple[Any, Any]:
    """Tokens and logits, without the cache, whose memory the next run may take over."""
    return result.sequences, torch.stack(result.logits)


def _compared(got: tuple[Any, Any], want: tuple[Any, Any]) -> dict[str, Any]:
    tokens = torch.equal(got[0], want[0])
    return {"tokens_equal": tokens, "equal": tokens and torch.equal(got[1], want[1])}


def _seconds(
    generation: Generation, config: str, cache: str, compiles: bool, want: Any, at_least: float
) -> tuple[float, float]:
    """Seconds to the first token, and for each after it: the shortest of several runs, because the
    host decides much of them, and others use it too. Nothing waits between tokens: a run of one
    token tells how long the first takes."""
    firsts: list[float] = []
    wholes: list[float] = []
    background.wait()
    start = time.perf_counter()
    while len(firsts) < 2 or time.perf_counter() - start < at_least:
        for tokens, times in ((1, firsts), (generation.new, wholes)):
            wait()
            begin = time.perf_counter()
            got = generation(cache, compiles, tokens)
            wait()
            times.append(time.perf_counter() - begin)
        if want is not None and not torch.equal(got, want):
            raise Wrong(f"{config}: not the tokens of eager with a {cache} cache")
    first = min(firsts)
    return first, (min(wholes) - first) / (generation.new - 1)


def run(
    presets: Sequence[str],
    configs: Sequence[str],
    *,
    device: str | None = None,
    dtype: str | None = None,
    out: Path | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Measure presets in turn; writes the rows so far to `out` after each."""
    if unknown := [c for c in configs if c not in CONFIGS]:
        near = suggestion(unknown[0], CONFIGS, "kernelwright bench generate --help")
        raise BadSetting("--config", f"no configuration {unknown[0]!r}; {near}")
    if unknown := [p for p in presets if p not in PRESETS]:
        near = suggestion(unknown[0], PRESETS, "kernelwright models")
        raise ValueError(f"{unknown[0]!r} is no preset that generates text; {near}")
    if out is not None:
        results.check_writable(out)
    at = place.choose_device(device, tiny=how.get("tiny", False))
    kind = place.choose_dtype(dtype, at)
    names = presets or PRESETS[:1]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(at) if at.type == "cuda" else nullcontext())
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("generating", total=len(names) * len(configs))
        for name in names:
            for row in measure(name, configs, device=str(at), dtype=kind, **how):
                rows.append(row | {"device": at.type})
                progress.advance(task)
                if out is not None:
                    results.write(out, "generation", rows, environment=environment_of(at))
            _fresh()
    return rows
