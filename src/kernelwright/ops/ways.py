"""How PyTorch computes here what exact kernels repeat, where it has had several ways.

A *subject* is a sum or a function that kernels repeat bit by bit: F.rms_norm's sum, the erf form of
GELU, ... Its *ways* are those that some PyTorch has had and that a kernel here has too. Which one
is in use is a guess from versions until calibration/ has compared: then it is what gave eager's
bits, or None if none did. A kernel that would need it is refused then, and its chain runs eager.
What was found is kept beside the compiled kernels, for this PyTorch, GPU and set of packages.

All GPUs of a process are taken to be of one kind, that of the current one.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch

from ..backends import Unsupported, torch_internals
from ..backends.cache import KernelCache
from ..backends.cuda import fingerprint, nvrtc_version

# the only way of a subject that has never changed
ATEN = "ATen"
QUACK = "QuACK"
COMPILER = "the compiler's erf"
# subjects by name: what they are, and their ways, each with its name in the CUDA sources
ERFS = {
    COMPILER: "CompilersErf",
    "erf of CUDA 13.0": "WrittenErf<kernelwright::Cuda130>",
    "erf of CUDA 13.2": "WrittenErf<kernelwright::Cuda132>",
}
RMS_NORMS = {ATEN: "TorchRms", QUACK: "QuackRms"}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "at::mean": (ATEN,),
    "F.rms_norm": tuple(RMS_NORMS),
    "F.layer_norm": (ATEN,),
    "the gradient of F.rms_norm": (ATEN,),
    "the gradient of F.layer_norm": (ATEN,),
    "F.gelu": tuple(ERFS),
    "F.gelu tanh": (ATEN,),
    **dict.fromkeys(("silu", "sigmoid", "exp", "tanh", "sin", "cos", "rsqrt"), (ATEN,)),
}
# packages and switches by which PyTorch replaces kernels of its own
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "nvmath-python", "triton")
REPLACING = PACKAGES[:2]  # those that replace F.rms_norm's
SWITCHES = (
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_NATIVE_SKIP_VERSION_CHECK",
    "PYTORCH_SUM_INNER_TREE",
)
Found = dict[str, str | None]


class _Thread(threading.local):
    assumed: dict[str, str] = {}  # noqa: RUF012
    asked: set[str] | None = None


_thread = _Thread()
_found: Found = {}
_looked = False  # whether what other processes have found was looked for
_lock = threading.Lock()


def way(subject: str) -> str:
    """The way of a subject that kernels repeat; raises Unsupported if none has eager's bits."""
    if _thread.asked is not None:
        _thread.asked.add(subject)
    if subject in _thread.assumed:
        return _thread.assumed[subject]
    known = _known()
    chosen = known[subject] if subject in known else guess(subject)
    if chosen is None:
        raise Unsupported(
            f"{subject} of torch {torch.__version__} has other bits here than any kernel "
            f"(kernelwright doctor --exact)"
        )
    return chosen


@contextmanager
def assuming(subject: str, way: str) -> Iterator[None]:
    """Take this way in the block, in this thread, to compare it with PyTorch."""
    before = _thread.assumed
    _thread.assumed = {**before, subject: way}
    try:
        yield
    finally:
        _thread.assumed = before


@contextmanager
def asked() -> Iterator[set[str]]:
    """The subjects that kernels planned in the block, in this thread, depend on."""
    before, _thread.asked = _thread.asked, set()
    try:
        yield _thread.asked
    finally:
        _thread.asked = before


def erf() -> str:
    """The name of F.gelu's erf in the CUDA sources."""
    return ERFS[way("F.gelu")]


def gelu_erf() -> str:
    """The erf form of GELU in the CUDA sources, in PyTorch's arithmetic."""
    name = erf()
    chosen = "" if name == ERFS[COMPILER] else f", kernelwright::{name}"
    return f"GeluErf<false{chosen}>"


def guess(subject: str) -> str:
    """What versions suggest: to be compared with PyTorch before it is relied on."""
    if subject == "F.gelu":
        return _guessed_erf(torch.version.cuda, nvrtc_version())
    if subject == "F.rms_norm" and torch_internals.native_kernels():
        return QUACK
    return SUBJECTS[subject][0]


def _guessed_erf(built: str | None, compiler: tuple[int, int] | None) -> str:
    """PyTorch's erf is that of the CUDA it was built with."""
    if built is None or compiler is None:
        return COMPILER
    major, minor = (int(n) for n in built.split(".")[:2])
    wanted = _erf_of((major, minor))
    return COMPILER if wanted in (None, _erf_of(compiler)) else str(wanted)


def _erf_of(cuda: tuple[int, int]) -> str | None:
    if cuda < (13, 0):
        return None
    return "erf of CUDA 13.0" if cuda < (13, 2) else "erf of CUDA 13.2"


def environment() -> tuple[str, ...]:
    """All that what was found depends on."""
    gpu = "no GPU"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu = f"{torch.cuda.get_device_name()}, capability {major}.{minor}"
    packages = (f"{name} {_version(name)}" for name in PACKAGES)
    switches = (f"{name}={os.environ.get(name, '')}" for name in SWITCHES)
    revision = getattr(torch.version, "git_version", "")
    return (f"torch {torch.__version__}", f"{revision}", gpu, *packages, *switches)


def replacing_packages() -> list[tuple[str, str]]:
    """Those of `REPLACING` that are installed, with their versions."""
    return [(name, found) for name in REPLACING if (found := _version(name)) != "-"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


@functools.cache
def _key(environment: tuple[str, ...]) -> str:
    return KernelCache.key("ways of PyTorch", fingerprint(), repr(SUBJECTS), *environment)


def stored() -> Found | None:
    """What was found in this environment, by any process; None if it was not compared yet."""
    text = KernelCache.default().read(_key(environment()), "json")
    if text is None:
        return None
    found = json.loads(text)
    fits = found.keys() <= SUBJECTS.keys() and all(
        w is None or w in SUBJECTS[s] for s, w in found.items()
    )
    return found if fits else None


def keep(found: Found) -> None:
    """Use what was found, and store it for other processes."""
    KernelCache.default().write(_key(environment()), json.dumps(found).encode(), "json")
    use(found)


def use(found: Found) -> None:
    """Use what was found, in this process; guesses for what is not in it."""
    with _lock:
        _found.clear()
        _found.update(found)


def _known() -> Found:
    global _looked
    # only where PyTorch has a GPU in use already: planning a kernel must not start CUDA
    if not _looked and torch.cuda.is_initialized():
        _looked = True
        if not _found:
            use(stored() or {})
    return _found
