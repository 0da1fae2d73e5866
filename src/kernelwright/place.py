"""Choose device and dtype: an idle GPU, unless a device is named."""

from __future__ import annotations

import os

import torch

from .errors import BadSetting, CannotRun
from .gpus import Gpu, nvidia_smi

DTYPES = ("bfloat16", "float16", "float32")


def choose_device(
    name: str | None, *, tiny: bool = False, smaller: str = "the tiny model (--tiny)"
) -> torch.device:
    """The device named; or an idle GPU; or, for a tiny model where there is no GPU, the CPU.
    `smaller` says what runs on a CPU in seconds, and how it is asked for."""
    if name is not None:
        return _named(name)
    if not torch.cuda.is_available():
        if tiny:
            return torch.device("cpu")
        raise CannotRun(
            f"torch sees no GPU: {smaller} runs on the CPU in seconds; --device cpu runs the full "
            "one there, for hours"
        )
    if torch.cuda.is_initialized():  # nvidia-smi would count this process as a user of the GPU
        return torch.device("cuda", torch.cuda.current_device())
    gpus = _visible(nvidia_smi()[1])
    idle = [index for index, gpu in gpus.items() if gpu.idle]
    if idle:
        return torch.device("cuda", idle[0])
    unknown = [index for index, gpu in gpus.items() if gpu.idle is None]
    if unknown or not gpus:  # idleness is unknown: use torch's own choice
        return torch.device("cuda", unknown[0] if unknown else torch.cuda.current_device())
    told = ", ".join(
        f"cuda:{i} has {g.processes} processes, {g.used} MiB used, {g.busy_percent}% busy"
        for i, g in gpus.items()
    )
    raise CannotRun(f"no GPU is idle ({told}): wait, or name one with --device")


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype named; or bfloat16, float16 on GPUs without it, float32 on the CPU."""
    if name is not None:
        if name not in DTYPES:
            raise BadSetting("--dtype", f"{name!r}, expected one of {', '.join(DTYPES)}")
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    new_enough = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if new_enough else torch.float16


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0]
        if name.partition(":")[0] != "cuda":  # PyTorch would list devices that we do not take
            said = "expected cuda, cuda:1 or cpu"
        elif not torch.cuda.is_available():
            said += "; `kernelwright doctor` says what is missing, and --device cpu needs no GPU"
        raise BadSetting("--device", f"{name!r} cannot be used: {said}") from None
    if device.type not in ("cuda", "cpu"):
        raise BadSetting("--device", f"{name!r}, expected cuda, cuda:1 or cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _visible(gpus: tuple[Gpu, ...]) -> dict[int, Gpu]:
    """GPUs by torch's index, which counts only those in CUDA_VISIBLE_DEVICES; empty if that
    variable does not list indices."""
    by_number = {str(gpu.index): gpu for gpu in gpus}
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = list(by_number) if asked is None else [n.strip() for n in asked.split(",")]
    if any(n not in by_number for n in numbers):
        return {}
    return {i: by_number[n] for i, n in enumerate(numbers)}
