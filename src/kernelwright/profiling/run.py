"""Runs the requested levels; a level that cannot run says what is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..close_names import suggestion
from ..errors import BadSetting
from ..measure import results
from ..measure.configs import CONFIGS
from ..measure.results import environment_of
from ..place import choose_device, choose_dtype
from ..progress import Show, show_nothing
from . import level1, nsight
from .our_kernels import pattern
from .workload import Workload, check

LEVELS = (1, 2, 3)
# eager has none of our kernels, which ncu profiles by default
DEFAULT_CONFIGS = {1: ("eager", "exact"), 2: ("eager", "exact"), 3: ("exact",)}


def run(
    preset: str,
    levels: Sequence[int] = (1,),
    configs: Sequence[str] = (),
    *,
    sizes: dict[str, int] | None = None,
    tiny: bool = False,
    device: str | None = None,
    kernels: str | None = None,
    launches: int = 50,
    trace: Path | None = None,
    out: Path | None = None,
    show: Show = show_nothing,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Profile a preset; returns result rows, and a line for each level that could not run.

    Without `configs`: eager and exact, side by side; exact alone at level 3. `trace` is a Chrome
    trace of level 1; with several configurations, one file each: trace.eager.json.
    """
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"no level {level}, expected any of 1, 2, 3")
    for config in configs:
        if config not in CONFIGS:
            near = suggestion(config, CONFIGS, "kernelwright profile --help")
            raise BadSetting("--config", f"no configuration {config!r}; {near}")
    kernels = kernels or pattern()
    try:
        re.compile(kernels)
    except re.error as error:
        raise ValueError(f"{kernels!r} is no regular expression: {error}") from None
    check(preset, tiny, sizes or {})
    for option, path in (("--trace", trace), ("--out", out)):
        if path is not None:
            results.check_writable(path, option)
    place = choose_device(device, tiny=tiny)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    workload = Workload(preset, str(place), tiny, sizes or {}, choose_dtype(None, place))
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    plan = {level: configs or DEFAULT_CONFIGS[level] for level in levels}
    profiled = show(f"profiling {preset}", sum(map(len, plan.values())))
    for level, wanted in plan.items():
        try:
            for config in wanted:
                if level == 1:
                    file = _for_config(trace, config) if trace and len(wanted) > 1 else trace
                    rows.append(level1.profile(workload, config, file))
                elif level == 2:
                    rows.append(nsight.profile_nsys(workload, config))
                else:
                    rows += nsight.profile_ncu(workload, config, kernels, launches)
                profiled()
        except nsight.CannotProfile as lack:
            problems.append(f"level {level}: {lack}")
    if out is not None and rows:
        results.write(out, "profile", rows, environment=environment_of(place))
    return rows, problems


def _for_config(trace: Path, config: str) -> Path:
    return trace.with_suffix(f".{config}{trace.suffix}")
