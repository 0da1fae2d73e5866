"""Cross-entropy of 16-bit logits, with the bits of F.cross_entropy(logits.float(), target).

The logits of a language model are its largest tensor: 1 GiB for 4096 tokens of Llama 3 in bfloat16.
PyTorch copies them to float32, writes their log_softmax, then its gradient, and copies that back:
nine passes over twice the bytes. Here the forward reads them and keeps two numbers a row, and the
backward reads them once more and writes the gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import backends
from ...backends import cuda

aten: Any = torch.ops.aten
REDUCTIONS = {"mean": 1, "sum": 2}  # numbers of ATen
NAMES = {torch.bfloat16: "kernelwright::bfloat16", torch.float16: "half"}
# log_softmax keeps shorter rows in shared memory or registers, and adds them up in another order
MIN_CLASSES = 12288
VECTOR = 8  # elements of 16 bytes
THREADS = {"": 1024, "_backward": 512}  # the first decides the order; the second is not tuned


def why_not(logits: Tensor) -> str | None:
    """Why logits [rows, classes] have no kernel, or None if they have one."""
    rows, classes = logits.shape
    if logits.device.type != "cuda":
        return f"on {logits.device.type}"
    if logits.dtype not in NAMES:
        return f"logits in {str(logits.dtype).removeprefix('torch.')}"
    if classes < MIN_CLASSES or classes % VECTOR:
        return f"rows of {classes}: no kernel has PyTorch's order"
    if not rows or logits.stride(1) != 1 or logits.stride(0) % VECTOR or logits.data_ptr() % 16:
        return "logits that no vector of 16 bytes begins at"
    return cuda.problem(logits.device, logits.dtype)


def cross_entropy(logits: Tensor, target: Tensor, ignored: int, reduction: str) -> Tensor:
    """F.cross_entropy of logits [rows, classes] for which there is a kernel."""
    return _CrossEntropy.apply(logits, target, ignored, reduction)


def eager(logits: Tensor, target: Tensor, ignored: int, reduction: str) -> Tensor:
    """The ops that it stands for."""
    return F.cross_entropy(logits.float(), target, ignore_index=ignored, reduction=reduction)


def row_numbers(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Of each row its largest logit, the logarithm of the sum of exponentials without that, and the
    log-probability of its target: [3, rows], float32."""
    numbers = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    launch = _launch("", logits, ignored)
    launch((logits.data_ptr(), target.data_ptr(), *(n.data_ptr() for n in numbers)))
    return numbers


def gradient_of_logits(
    logits: Tensor, target: Tensor, ignored: int, numbers: Tensor, gradient: Tensor
) -> Tensor:
    """The gradient of logits, given that of the log-probability of each row's target."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch = _launch("_backward", logits, ignored)
    given = (logits, target, *numbers, gradient, out)
    launch([t.data_ptr() for t in given])
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int, reduction: str) -> Tensor:
        numbers = row_numbers(logits, target, ignored)
        # PyTorch's own sum of the rows: it reads one column of what it is given
        first = torch.where(target == ignored, ignored, 0)
        code = REDUCTIONS[reduction]
        loss, weight = aten.nll_loss_forward(numbers[2][:, None], first, None, code, ignored)
        ctx.save_for_backward(logits, target, first, numbers, weight)
        ctx.ignored, ctx.reduction = ignored, reduction
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target, first, numbers, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            loss = eager(logits, target, ctx.ignored, ctx.reduction)
            (found,) = torch.autograd.grad(loss, logits, gradient, create_graph=True)
            return found, None, None, None
        of_rows = aten.nll_loss_backward(
            *(gradient, numbers[2][:, None], first, None),
            *(REDUCTIONS[ctx.reduction], ctx.ignored, weight),
        )
        found = gradient_of_logits(logits, target, ctx.ignored, numbers, of_rows)
        return found, None, None, None


def _launch(which: str, logits: Tensor, ignored: int) -> Any:
    rows, classes = logits.shape
    return _loaded(which, logits.device, logits.dtype, rows, classes, logits.stride(0), ignored)


@functools.lru_cache(maxsize=128)
def _loaded(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    classes: int,
    step: int,
    ignored: int,
) -> Any:
    launch = launch_of(which, dtype, rows, classes, step, ignored)
    present: dict[str, Any] = dict.fromkeys(launch.pointers, True)
    if not which:
        present |= {"gradient": None, "d_logits": None}
    return backends.load(launch, present, device, "cross-entropy")


def launch_of(
    which: str, dtype: torch.dtype, rows: int, classes: int, step: int, ignored: int
) -> cuda.CudaLaunch:
    """The launch of the forward ("") or of the "_backward"."""
    elements = f"{NAMES[dtype]}, {VECTOR}" if which else NAMES[dtype]
    return cuda.CudaLaunch(
        source="inject/training/cross_entropy.cuh",
        template=f"kernelwright::cross_entropy{which}<{elements}>",
        arguments="kernelwright::CrossEntropyArgs",
        grid=rows,
        block=THREADS[which],
        pointers=("logits", "target", "top", "log_sum", "log_prob", "gradient", "d_logits"),
        layout="2qI",
        scalars=(step, ignored, classes),
    )
