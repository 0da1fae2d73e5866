"""The rows of result files, typed, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Environment:
    """Where and how a file was made."""

    gpu: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    triton: str | None
    python: str | None
    commit: str | None
    date: str | None
    command: str | None

    @property
    def device(self) -> str:
        return self.gpu or "CPU"


@dataclass(frozen=True)
class ModelRow:
    """One forward of a model in one configuration; `ms` is None where it failed."""

    model: str
    config: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    tiny: bool
    ms: float | None
    failed: str | None
    equal: bool | None
    error: float | None
    first_s: float | None
    peak_gib: float | None
    replaced: int | None
    sites: dict[str, dict[str, int]]
    problems: tuple[str, ...]
    graphs: tuple[str, ...]
    split: dict[str, float]

    @property
    def title(self) -> str:
        """The model and its sizes: `ltx-video 49 frames 768×512 batch 2`."""
        sizes = dict(self.sizes)
        words = [self.model, "tiny" if self.tiny else ""]
        if "frames" in sizes:
            words.append(f"{sizes.pop('frames')} frames")
        if {"width", "height"} <= sizes.keys():
            words.append(f"{sizes.pop('width')}×{sizes.pop('height')}")
        if "tokens" in sizes:
            words.append(f"{sizes.pop('tokens')} tokens")
        words += [f"{name} {value}" for name, value in sizes.items() if (name, value) != BATCH_OF_1]
        return " ".join(w for w in words if w)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("model", self.model, self.tiny, tuple(sorted(self.sizes)), self.dtype, self.config)


BATCH_OF_1 = ("batch", 1)


@dataclass(frozen=True)
class OpRow:
    """One op at one size: microseconds of each way to compute it."""

    op: str
    case: str
    dtype: str
    chosen: str
    megabytes: float
    copy_us: float
    gpu_us: dict[str, float]
    host_us: dict[str, float]

    @property
    def roof(self) -> float:
        """GB/s of a copy of as many bytes, measured in the same run."""
        return self.megabytes / self.copy_us * 1e3

    @property
    def slowest_exact(self) -> str | None:
        """The way with the bits of eager that takes longest, where an op has several."""
        ways = [way for way in self.gpu_us if way.startswith("exact:")]
        return max(ways, key=lambda way: self.gpu_us[way], default=None)

    def bandwidth(self, way: str) -> float:
        """GB/s: every byte read or written once, over the GPU time."""
        return self.megabytes / self.gpu_us[way] * 1e3

    def share(self, way: str) -> float:
        """Part of the copy's bandwidth that `way` reaches."""
        return self.copy_us / self.gpu_us[way]

    def key(self, way: str) -> tuple[Any, ...]:
        return ("op", self.op, self.case, self.dtype, way)


@dataclass(frozen=True)
class ExactRow:
    """Elements of an exact mode that differ from eager; `mismatches` is None without a kernel."""

    op: str
    chain: str
    dtype: str
    width: int
    rows: int
    elements: int
    mismatches: int | None

    @property
    def key(self) -> tuple[Any, ...]:
        return ("exact", self.op, self.chain, self.dtype, self.width, self.rows)
