"""Compares samples of many tensors with copies of them: one kernel a GPU and element size.

PyTorch's own ops take a copy of all samples and two passes over it: on an H200, before each forward
of LTX-Video, 0.2 of 41 ms of the GPU and as much of the host. On a CPU a copy of each view costs 9
us: 2 ms for the weights of Llama-3-8B, which rest there in fp8, and a token takes 3 ms. So short
views are read by one op, by their addresses, or by the GPU where their memory is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...backends import cuda
from ...backends.torch_internals import unowned_storage

ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
SHORT = 1024  # elements of a view that is read by address
THREADS, PIECE = 256, 1024  # not tuned: 4 loads a thread keep enough bytes in flight


def is_readable(view: Tensor, device: torch.device) -> bool:
    """Whether a view can be compared on a device: it lies there, or in pinned memory, which a
    kernel on a GPU reads at the addresses that the host has for it."""
    if view.device == device:
        return True
    if view.device.type != "cpu" or not (_has_one_stride(view) and _has_kernel(device, view.dtype)):
        return False
    return view.is_pinned()


class SampleComparison:
    """Integer views of tensors, and what they held. The views must be of the same memory at each
    call; this keeps them, and so what they keep alive. With `device`, that is where views are
    compared that `is_readable` there."""

    def __init__(
        self, now: Sequence[Tensor], then: Sequence[Tensor], device: torch.device | None = None
    ) -> None:
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for view, values in zip(now, then, strict=True):
            if view.numel() == 0:
                continue
            place = device if device is not None and is_readable(view, device) else view.device
            short = place.type == "cuda" or view.numel() <= SHORT
            key = place, view.dtype, _has_one_stride(view) and short
            views, copies = groups.setdefault(key, ([], []))
            views.append(view)
            copies.append(values.reshape(-1).to(place))
        self._runs = [
            _comparison(device, dtype, one_stride)(views, torch.cat(copies))
            for (device, dtype, one_stride), (views, copies) in groups.items()
        ]

    def __call__(self) -> list[Tensor]:
        """Start the comparison: boolean tensors, all true if nothing has changed."""
        with torch.no_grad():
            return [run() for run in self._runs]


def _comparison(
    device: torch.device, dtype: torch.dtype, one_stride: bool
) -> Callable[[list[Tensor], Tensor], Callable[[], Tensor]]:
    if one_stride and device.type == "cpu":
        return _ByAddress
    if one_stride and _has_kernel(device, dtype):
        return _Kernel
    return _torch_ops


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return cuda.problem(device, dtype) is None


def _has_one_stride(view: Tensor) -> bool:
    return view.ndim < 2 or view.is_contiguous()


def _torch_ops(views: list[Tensor], then: Tensor) -> Callable[[], Tensor]:
    return lambda: (torch.cat([v.reshape(-1) for v in views]) == then).all()


class _ByAddress:
    """Compares views in CPU memory, of one element size. One tensor spans the memory of all of
    them; only elements of the views are read from it."""

    def __init__(self, views: list[Tensor], then: Tensor) -> None:
        self._views, self._then = views, then
        size = then.element_size()
        addresses = torch.cat([_addresses(view) for view in views])
        first, last = int(addresses.min()), int(addresses.max())
        span = unowned_storage(first, then.device, last - first + size)
        # a view of another alignment than the first cannot be reached in whole elements
        self._aligned = not ((addresses - first) % size).any()
        self._places = (addresses - first) // size
        self._span = then.new_empty(0).set_(span)

    def __call__(self) -> Tensor:
        if not self._aligned:
            return _torch_ops(self._views, self._then)()
        return (self._span.take(self._places) == self._then).all()


def _addresses(view: Tensor) -> Tensor:
    step = view.element_size() * (view.stride(0) if view.ndim == 1 else 1)
    return view.data_ptr() + step * torch.arange(view.numel())


class _Kernel:
    """Compares views of one element size on one device, cut into pieces of one block each."""

    def __init__(self, views: list[Tensor], then: Tensor) -> None:
        device = then.device
        self._views, self._then, self._device = views, then, device
        size, kept = then.element_size(), then.data_ptr()
        pieces = []
        for view in views:
            step = size * (view.stride(0) if view.ndim == 1 else 1)
            for begin in range(0, view.numel(), PIECE):
                count = min(PIECE, view.numel() - begin)
                pieces.append((view.data_ptr() + begin * step, step, count, kept))
                kept += count * size
        self._table = torch.tensor(pieces, dtype=torch.int64).to(device)
        launch = cuda.CudaLaunch(
            source="inject/state/samples.cuh",
            template=f"kernelwright::compare_samples<{ELEMENTS[size]}>",
            arguments="kernelwright::SampleArgs",
            grid=len(pieces),
            block=THREADS,
            pointers=("pieces", "unchanged"),
            layout="",
            scalars=(),
        )
        present = dict.fromkeys(launch.pointers, True)
        self._launch = backends.load(launch, present, device, "a comparison of samples")

    def __call__(self) -> Tensor:
        unchanged = torch.ones((), dtype=torch.bool, device=self._device)
        with torch.cuda.device(self._device):
            self._launch((self._table.data_ptr(), unchanged.data_ptr()))
        return unchanged
