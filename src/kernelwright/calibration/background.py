"""Calibration in the background: once for a PyTorch, GPU and set of packages, in a process of its
own, of the lowest priority, started after the first forward of an injected model.

A process, not a thread: it cannot disturb a CUDA graph that is being captured, and takes no time of
this interpreter. It needs some memory of the GPU, so it is not started on a full one.
KERNELWRIGHT_CALIBRATE=0 in the environment turns it off; `kernelwright doctor --exact` calibrates
at any time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import torch

from ..backends import Unsupported
from ..backends.cache import KernelCache
from ..backends.user_warnings import warn
from ..ops import ways
from ..ops.op import Op, registry

# of the GPU: a CUDA context and some tensors take 0.6 GiB on an H200
NEEDED_BYTES = 4 << 30
# the process compiles some twenty kernels; on a busy machine it may take long, but not for ever
SECONDS = 300

_lock = threading.Lock()
_considered = False
_thread: threading.Thread | None = None  # waits for the process


def consider() -> None:
    """Start it if nothing was found for this environment yet; does so at most once a process."""
    global _considered, _thread
    if _considered:
        return
    with _lock:
        if _considered:
            return
        _considered = True
    if why_not() is None:
        _thread = threading.Thread(target=_run, name="kernelwright-calibration", daemon=True)
        _thread.start()


def wait() -> None:
    """Wait for a calibration that this process has started: until it ends it uses the GPU, too."""
    if _thread is not None:
        _thread.join()


def why_not() -> str | None:
    """Why no calibration is started, or None if one is needed."""
    if os.environ.get("KERNELWRIGHT_CALIBRATE") == "0":
        return "KERNELWRIGHT_CALIBRATE=0"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return "another process of this job does it"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not KernelCache.default().writable():
        return "the cache of kernels cannot be written"
    if ways.stored() is not None:
        return "it was done before"
    free, _ = torch.cuda.mem_get_info()
    return None if free > NEEDED_BYTES else "the GPU is full"


def command() -> list[str]:
    return [sys.executable, "-m", "kernelwright.calibration"]


def _run() -> None:
    """Wait for the process, and take what it found."""
    visible = {"CUDA_VISIBLE_DEVICES": _this_gpu(), "KERNELWRIGHT_CALIBRATE": "0"}
    try:
        subprocess.run(
            command(),
            env={**os.environ, **{k: v for k, v in visible.items() if v is not None}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return
    adopt(ways.stored())


def _this_gpu() -> str | None:
    """The current GPU, as CUDA_VISIBLE_DEVICES names it; None if that cannot be said."""
    try:
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (AttributeError, RuntimeError):
        return None


def adopt(found: ways.Found | None) -> list[str]:
    """Use what was found from now on. Plans of kernels that rest on another guess are dropped; what
    no kernel repeats is warned of, and named."""
    if found is None:
        return []
    changed = [s for s, way in found.items() if way != _in_use(s)]
    ways.use(found)
    if changed:
        for op in registry().values():
            if isinstance(op, Op):
                op.forget()
    lost = [s for s, way in found.items() if way is None]
    if lost:
        warn(
            f"{', '.join(lost)} of torch {torch.__version__} have other bits here "
            f"than any kernel: their chains run eager in exact mode (kernelwright doctor --exact)"
        )
    return changed


def _in_use(subject: str) -> str | None:
    try:
        return ways.way(subject)
    except Unsupported:
        return None
