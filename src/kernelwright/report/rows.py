"""Typed rows of result files, and figures derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANDOM = "random weights"
CPU = "CPU"


@dataclass(frozen=True)
class Environment:
    """Where, when and how a file was measured."""

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
        return self.gpu or CPU


@dataclass(frozen=True)
class Workload:
    """A model and the sizes that it ran with."""

    model: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    tiny: bool

    @property
    def size(self) -> str:
        """The sizes in short: `49f 768×512 batch 2`."""
        sizes = dict(self.sizes)
        words = []
        if "frames" in sizes:
            words.append(f"{sizes['frames']}f")
        if {"width", "height"} <= sizes.keys():
            words.append(f"{sizes['width']}×{sizes['height']}")
        if "tokens" in sizes:
            words.append(f"{sizes['tokens']} tokens")
        if sizes.get("batch", 1) > 1:
            words.append(f"batch {sizes['batch']}")
        if "layers" in sizes:
            words.append(f"{sizes['layers']} layers")
        return " ".join(words)

    @property
    def title(self) -> str:
        """`ltx-video 49f 768×512 batch 2`; a dtype other than bfloat16 is named."""
        kind = "" if self.dtype == "bfloat16" else self.dtype
        words = (self.model, "tiny" if self.tiny else "", self.size, kind)
        return " ".join(word for word in words if word)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.model, self.tiny, tuple(sorted(self.sizes)), self.dtype)


@dataclass(frozen=True)
class ModelRow:
    """One forward of a model in one configuration; `ms` is None where it failed."""

    workload: Workload
    config: str
    ms: float | None
    failed: str | None
    unavailable: bool
    equal: bool | None
    error: float | None
    first_s: float | None
    cold_s: float | None
    warm_s: float | None
    other_first_s: float | None
    other_second_s: float | None
    peak_gib: float | None
    steady_reserved_gib: float | None
    replaced: int | None
    sites: dict[str, dict[str, int]]
    problems: tuple[str, ...]
    graphs: tuple[str, ...]
    split: dict[str, float]

    @property
    def key(self) -> tuple[Any, ...]:
        return ("model", *self.workload.key, self.config)


@dataclass(frozen=True)
class TrainingRow:
    """One training step of a model in one configuration; `ms` is None where it failed. Of the
    gradients and losses, how many are eager's, and how many a second eager run gives again."""

    workload: Workload
    lora: int | None
    checkpointing: bool
    attention: str
    config: str
    ms: float | None
    failed: str | None
    unavailable: bool
    gradients: int
    gradients_equal: int
    gradients_repeated: int
    losses: int
    losses_equal: int
    error: float | None
    first_s: float | None
    peak_gib: float | None
    problems: tuple[str, ...]

    @property
    def title(self) -> str:
        """`ltx-video 49f 768×512, LoRA rank 64, checkpointing`"""
        words = [self.workload.title, f"LoRA rank {self.lora}" if self.lora else "all weights"]
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"{self.attention} attention"] if self.attention != "default" else []
        return ", ".join(words)

    @property
    def equal(self) -> bool | None:
        """Whether every gradient and loss is eager's; None where it failed."""
        if self.failed:
            return None
        return (self.gradients_equal, self.losses_equal) == (self.gradients, self.losses)

    @property
    def key(self) -> tuple[Any, ...]:
        how = (self.lora, self.checkpointing, self.attention)
        return ("training", *self.workload.key, *how, self.config)


@dataclass(frozen=True)
class OpRow:
    """One op at one size: microseconds of each implementation, on the GPU where there is one."""

    op: str
    case: str
    dtype: str
    chosen: str
    megabytes: float
    copy_us: float
    us: dict[str, float]
    host_us: dict[str, float]
    error: dict[str, float]
    peers: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def roof(self) -> float:
        """GB/s of a copy of as many bytes, measured in the same run."""
        return self.megabytes / self.copy_us * 1e3

    @property
    def slowest_exact(self) -> str | None:
        """The slowest of the op's exact modes."""
        ways = [way for way in self.us if way.startswith("exact:")]
        return max(ways, key=lambda way: self.us[way], default=None)

    def bandwidth(self, way: str) -> float:
        """GB/s: every byte read or written once, over the GPU time."""
        return self.megabytes / self.us[way] * 1e3

    def share(self, way: str) -> float:
        """Share of the copy's bandwidth that `way` reaches."""
        return self.copy_us / self.us[way]

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


@dataclass(frozen=True)
class VideoRow:
    """One generation from prompt to frames; times in seconds, None where it failed."""

    workload: Workload
    weights: str
    steps: int
    guidance: float | None
    config: str
    failed: str | None
    equal: bool
    psnr_db: float | None
    total_s: float | None
    step_s: float | None
    frame_s: float | None
    parts: dict[str, float]
    gib: float | None
    ready_s: float | None
    problems: tuple[str, ...]
    graphs: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.workload.title}, {self.steps} steps"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("video", *self.workload.key, self.weights, self.steps, self.guidance, self.config)


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in one forward."""

    name: str
    category: str
    ours: bool
    calls: int
    ms: float


@dataclass(frozen=True)
class ProfileRow:
    """Kernels of one forward, by torch.profiler (level 1) or nsys (level 2)."""

    workload: Workload
    level: int
    config: str
    kernel_ms: float
    wall_ms: float | None
    launches: int
    categories: dict[str, float]
    kernels: tuple[Kernel, ...]
    graph_breaks: int | None

    @property
    def key(self) -> tuple[Any, ...]:
        return ("profile", *self.workload.key, self.level, self.config)


@dataclass(frozen=True)
class CountedRow:
    """What ncu counted of one kernel at one grid (level 3)."""

    workload: Workload
    config: str
    name: str
    grid: str
    block: str
    launches: int
    us: float | None
    dram_gbs: float | None
    dram_percent: float | None
    compute_percent: float | None
    occupancy: float | None
    theoretical_occupancy: float | None
    limiter: str | None
    advice: str

    @property
    def key(self) -> tuple[Any, ...]:
        kernel = (self.config, self.name, self.grid, self.block)
        return ("counted", *self.workload.key, *kernel)
