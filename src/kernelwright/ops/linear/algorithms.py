"""F.linear, bit for bit, by the cuBLASLt algorithm that was fastest on the first call; optionally
with GELU in its epilogue.

PyTorch takes the first algorithm that cuBLASLt's heuristic returns. On a GPU at its power limit
that is not always the fastest: 35552 x 3072 to 12288 (bias, bfloat16) takes 4083 us on an H200, and
3930 by another that has the same bits. See `choosing` for how it is found, and `configurations` for
algorithms that the heuristic does not return.

KERNELWRIGHT_CUBLASLT=0 in the environment leaves every GEMM to PyTorch.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ...backends import torch_internals
from .. import selection
from ..plan_cache import PLAIN
from . import choosing
from .choosing import MISALIGNED, Decision, Way, aligned, choose
from .plain import plain

# about 40 us on an H200 at 600 TFLOP/s. 2% of a shorter GEMM is less than a microsecond, and its
# launch costs as much as a better algorithm saves
LEAST_FLOP = 2**34.5
# a choice costs some 30 GEMMs: with ever new sequence lengths it would never pay off
MAX_DECISIONS = 256

# layers whose last call is remembered
MAX_SITES = 4096

_decisions: dict[Any, Decision] = {}
_sites: dict[int, CallSite] = {}  # by the id of the weight: what lies otherwise is noticed
_epoch = object()  # of the decisions
_choosing = threading.Lock()
_on = ContextVar("kernelwright_cublaslt", default=os.environ.get("KERNELWRIGHT_CUBLASLT") != "0")


class _Thread(threading.local):
    """cuBLASLt needs a CUDA context in the calling thread; a first F.linear creates it."""

    ready = False


_thread = _Thread()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """y = x @ weight^T + bias: F.linear(x, weight, bias), bit for bit, by the algorithm that was
    fastest on the first call.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        gelu: the tanh form of GELU in the epilogue, as in torch._addmm_activation; needs a bias.

    The first large GEMM of a signature on a GPU of capability 9.0, in float16 or bfloat16, tries
    all algorithms on its data and takes up to 60 ms, or 27 times the GEMM if that is longer; what
    wins is kept on disk, and later processes compare its bits alone. Everything else is F.linear
    itself: small GEMMs, other GPUs, gradients, autocast, torch.compile, a CUDA graph that is being
    captured.

    >>> linear(torch.ones(1, 2), torch.tensor([[0.5, 0.25]]))
    tensor([[0.7500]])
    """
    # of the states that torch.compiler.is_compiling covers, the other checks miss Dynamo's only
    if torch.compiler.is_dynamo_compiling():
        return plain(x, weight, bias, gelu)
    if gelu or type(weight) is not Parameter or torch_internals.jit_state() is not None:
        return _asked(x, weight, bias, gelu)[0]
    if 2 * x.numel() * weight.shape[0] < LEAST_FLOP:
        return plain(x, weight, bias, gelu)
    site = _sites.get(id(weight))
    if site is None:
        if len(_sites) >= MAX_SITES:
            _sites.clear()
        site = _sites[id(weight)] = CallSite()
    return site(x, weight, bias)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """torch.mm(a, b), bit for bit, as `linear` computes products with a transposed matrix.

    >>> mm(torch.ones(1, 2), torch.tensor([[0.5], [0.25]]))
    tensor([[0.7500]])
    """
    return linear(a, b.t())


class CallSite:
    """`linear`, or `mm` if `transposed`, at one place of a model, where tensors lie alike at nearly
    every call: whether they do is asked at once instead of one property after the other."""

    __slots__ = ("_last", "_transposed")

    def __init__(self, transposed: bool = False) -> None:
        self._last: _Last | None = None
        self._transposed = transposed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        last = self._last
        if last is not None and last.holds(x, weight, bias):
            out = last.way.room()
            if last.way.into(out, x, weight, bias) == 0:
                return out
        y, way = _asked(x, weight.t() if self._transposed else weight, bias, False)
        if way is not None:
            self._last = _Last(way, x, weight, bias)
        return y


class _Last:
    """A call of a site that ran by another algorithm than PyTorch's."""

    __slots__ = ("_biased", "_check", "_epoch", "_switches", "way")

    def __init__(self, way: Way, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        given = (x, weight) if bias is None else (x, weight, bias)
        self.way, self._biased, self._epoch = way, bias is not None, _epoch
        self._check = torch_internals.layout_check(given)
        self._switches = torch_internals.gemm_switches()

    def holds(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the next call may run as this one did."""
        if self._epoch is not _epoch or (bias is not None) is not self._biased:
            return False
        if not _thread.ready:
            return False
        same = self._check(x, weight) if bias is None else self._check(x, weight, bias)
        return (
            same and torch_internals.gemm_switches() == self._switches and _may_now(x, weight, bias)
        )


def _asked(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> tuple[Tensor, Way | None]:
    """The result, and the algorithm that has computed it if it was not PyTorch's."""
    if not _may_choose(x, weight, bias):
        return plain(x, weight, bias, gelu), None
    try:
        key = (
            (x.shape, x.stride(), x.dtype, x.device),
            (weight.shape, weight.stride(), weight.dtype, weight.device),
            bias is not None and (bias.shape, bias.stride(), bias.dtype, bias.device),
            gelu,
            torch_internals.gemm_switches(),
        )
    except RuntimeError:  # a nested tensor
        return plain(x, weight, bias, gelu), None
    decision = _decisions.get(key)
    if decision is None:
        return _first(key, x, weight, bias, gelu), None
    way = decision.way
    if way is None or not _thread.ready:
        _thread.ready = True
        return plain(x, weight, bias, gelu), None
    out = way.room()
    status = way.into(out, x, weight, bias)
    if status == 0:
        return out, way
    if status != MISALIGNED:
        why = f"cublasLtMatmul answered with status {status}"
        _decisions[key] = replace(decision, way=None, why=why)
    return plain(x, weight, bias, gelu), None


@contextmanager
def use_algorithms(on: bool) -> Iterator[None]:
    """Whether `linear` may take another algorithm than PyTorch's inside the block."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def decisions() -> list[Decision]:
    """The decisions so far, one per signature."""
    return list(_decisions.values())


def describe() -> str:
    """One line: how many GEMMs run by another algorithm, how much faster, and why others do not."""
    made = decisions()
    if not made:
        return "no product was large enough to choose an algorithm for"
    gains = sorted(d.torch_us / d.us for d in made if d.way and d.torch_us and d.us)
    text = f"{len(gains)} of {len(made)} products by another algorithm than PyTorch's"
    if gains:
        text += f", {gains[0]:.2f} to {gains[-1]:.2f} times as fast"
    kept = Counter(d.why for d in made if d.way is None)
    why_not = [f"{n} not: {why}" for why, n in kept.most_common()]
    devices = dict.fromkeys(key[0][-1] for key in list(_decisions))
    return "; ".join([text, *why_not, *dict.fromkeys(map(unnamed, devices))])


def unnamed(device: torch.device) -> str:
    """One line: whether configurations that cuBLASLt's heuristic does not return are tried on this
    GPU, and why not."""
    if not _on.get():
        why: str | None = "KERNELWRIGHT_CUBLASLT=0 leaves products to PyTorch"
    elif not serves(device):
        why = "algorithms are chosen on GPUs of capability 9.0"
    else:
        why = choosing.unnamed_problem(-1 if device.index is None else device.index)
    state = "tried" if why is None else f"not tried: {why}"
    return f"configurations that cuBLASLt does not name are {state}"


def forget() -> None:
    """Forget all decisions and choose again."""
    global _epoch
    _epoch = object()
    _decisions.clear()
    _sites.clear()
    choosing.forget()


def _may_choose(x: Any, weight: Any, bias: Any) -> bool:
    """Whether this call may bypass F.linear, as far as can be said without its layout."""
    return (
        type(x) in PLAIN
        and type(weight) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and weight.ndim == 2
        and torch_internals.jit_state() is None  # it would trace the next line
        and 2 * x.numel() * weight.shape[0] >= LEAST_FLOP
        and x.layout is weight.layout is torch.strided
        and serves(x.device)
        and _may_now(x, weight, bias)
    )


def _may_now(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """What `_may_choose` asks that does not depend on layouts."""
    return (
        torch_internals.jit_state() is None
        and _on.get()
        and not (torch.is_grad_enabled() and _needs_grad(x, weight, bias))
        and not _watched()
        and selection.current.get() != "torch"
    )


def _needs_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


def _watched() -> bool:
    """Whether a mode, autocast, torch.func or forward-mode AD has to see F.linear."""
    return bool(
        torch_internals.dispatch_modes()
        or torch_internals.function_modes()
        or torch_internals.any_autocast()
        or torch_internals.in_functorch()
        or torch_internals.in_forward_ad()
    )


@functools.cache
def serves(device: torch.device) -> bool:
    """Whether this is a GPU of the kind that was measured."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) == (9, 0)


def _first(key: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """Run F.linear; then time cuBLASLt's algorithms, unless capturing, misaligned or full."""
    expected = plain(x, weight, bias, gelu)
    _thread.ready = True
    full = len(_decisions) >= MAX_DECISIONS
    if full or not aligned(x, weight, bias) or torch.cuda.is_current_stream_capturing():
        return expected
    # only one thread chooses; the others return PyTorch's result
    if _choosing.acquire(blocking=False):
        try:
            if key not in _decisions:
                _decisions[key] = choose(x, weight, bias, gelu, expected)
        finally:
            _choosing.release()
    return expected
