"""Packs the weights of linear layers that share an input next to each other in memory.

Query, key and value are then one GEMM, and so are the two projections of a gated feed-forward. The
weights stay the same parameters, with the same names, shapes and values. Only their memory changes:
slices of one block, each with a storage of its own, so that saving, copying or moving one of them
does not touch the others. The block lives as long as one of its slices; no second copy is kept.
Every call compares the addresses of the weights, so one that was moved, swapped or loaded again is
noticed, and they are packed again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ...backends import torch_internals
from ..graphs import buffers
from ..graphs.capture import capturing, relocated
from ..runtime import model_run

# PyTorch's own allocations on the CPU start at multiples of this
CPU_ALIGNMENT = 64
# weights that have left their block LIMIT times after fewer than CALLS calls are moved routinely,
# as group offload does: stop packing them
CALLS, LIMIT = 8, 3
# the share of a GPU's memory from which on its allocator may keep remainders; not tuned
PLENTY = 0.25
# torch.compile keeps temporary references to weights during its first run: retry
TRIES = 3

SHARED = "one of its weights shares its memory"
UNLIKE = "its layers differ in dtype, device, input or bias"
MOVED = "its weights keep being moved, as by offloading"


class Packed(NamedTuple):
    """The weights of several layers as one: [sum of outputs, inputs], and the bias or None."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]


@dataclass
class _Group:
    """The state of layers that are packed together."""

    facts: Any = None  # addresses and layouts of the weights when `blocks` or `why` was set
    why: str | None = None  # why they are not packed
    blocks: tuple[TensorWeakRef, ...] = ()
    sizes: tuple[int, ...] = ()
    calls: int = 0
    moved: int = 0
    tries: int = 0  # how often in a row a weight shared its memory

    @property
    def settled(self) -> bool:
        return self.why != SHARED or self.tries >= TRIES


_groups: WeakKeyDictionary[nn.Module, _Group] = WeakKeyDictionary()
# the same by the storage of the first weight: a compiled graph passes weights, not modules
_of_weights: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()
_PARAMETER = frozenset((nn.Parameter,))


def packed(layers: Sequence[nn.Linear], x: Tensor) -> Packed | str:
    """The packed weights of plain linear layers, or why they are not packed. Packs them if
    needed."""
    own = [layer._parameters for layer in layers]  # faster than through nn.Module.__getattr__
    weights: list[Any] = [p["weight"] for p in own]
    biases: list[Any] = [b for p in own if (b := p["bias"]) is not None]
    group = _groups.get(layers[0])
    if group is None:
        group = _groups[layers[0]] = _group_of(weights[0])
    return _packed(group, weights, biases, x)


def packed_weights(weights: list[Any], biases: list[Any], x: Tensor) -> Packed | str:
    """`packed` for callers that have weights, not modules."""
    return _packed(_group_of(weights[0]), weights, biases, x)


def _group_of(weight: Any) -> _Group:
    storage = weight.untyped_storage()
    found = _of_weights.get(storage)
    if found is None:
        with _lock:
            found = _of_weights.setdefault(storage, _Group())
    return found


def _packed(group: _Group, weights: list[Any], biases: list[Any], x: Tensor) -> Packed | str:
    first = weights[0]
    if type(x) is not Tensor or not _PARAMETER.issuperset(map(type, weights)):
        return "a tensor subclass"
    if x.dtype is not first.dtype or x.device != first.device:
        return "its dtype or device changes"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
        return "gradients are recorded"
    mixed = torch_internals.any_autocast() and torch.is_autocast_enabled(x.device.type)
    if mixed or torch_internals.jit_state() is not None:
        return "autocast or a JIT trace"
    blocks = _blocks(group, weights + biases)
    if blocks is None or not group.settled:
        if group.moved >= LIMIT:
            return MOVED
        if why := why_not_now(x.device):
            return why
        with _lock:
            blocks = _blocks(group, weights + biases)
            if blocks is None or not group.settled:
                blocks = _pack(group, weights, biases)
                _of_weights[first.untyped_storage()] = group
    why = group.why
    if why is not None or not blocks:
        return why or SHARED  # no reason left: another thread has packed them since
    group.calls += 1
    return Packed(blocks[0], blocks[1] if biases else None, group.sizes)


def why_not_now(device: torch.device) -> str | None:
    """Why weights must not be moved at this moment, or None."""
    if capturing() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "a graph was captured before its first run"
    if torch_internals.dispatch_modes():
        return "a dispatch mode sees every operation"
    if torch_internals.warms_up_cudagraphs(device):
        return "torch.compile is about to capture a graph"
    return None


def _facts(weights: list[Any]) -> Any:
    """Addresses and layouts of weights."""
    return [(w.data_ptr(), w.shape, w.stride(), w.dtype) for w in weights]


def _blocks(group: _Group, weights: list[Any]) -> list[Any] | None:
    """The blocks of these weights, or None if a weight was moved or a block is gone."""
    if group.facts != _facts(weights):
        return None
    blocks = []
    for reference in group.blocks:
        # the addresses match, but may have been reused after the block was freed
        if (block := reference()) is None:
            return None
        blocks.append(block)
    return blocks


def _pack(group: _Group, weights: list[Any], biases: list[Any]) -> list[Tensor]:
    if group.blocks:
        group.moved += group.calls < CALLS
    blocks: list[Tensor] = []
    group.why = _why_not(weights, biases)
    group.tries = group.tries + 1 if group.why == SHARED else 0
    if group.moved >= LIMIT:
        group.why = MOVED
    if group.why is None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                _release_cached_memory(weights[0])
                blocks = [_move_into_block(parts) for parts in (weights, biases) if parts]
        except torch.OutOfMemoryError:
            group.why = "there was no memory to pack its weights"
        if weights[0].is_cuda:
            _wait(torch.cuda.current_stream(weights[0].device))
        relocated()
    group.blocks, group.calls = tuple(map(TensorWeakRef, blocks)), 0
    group.sizes = tuple(map(len, weights))
    group.facts = _facts(weights + biases)
    return blocks


def _wait(stream: Any) -> None:
    """Wait for a stream before the next call, which may use another: when the forward of the model
    has ended, so that the GPU has work to do until then. A hook may move weights before."""
    running = model_run.active
    if running.at_end is None or running.run_once is not None:
        stream.synchronize()
    else:
        running.at_end.append(stream.synchronize)


def _why_not(weights: list[Any], biases: list[Any]) -> str | None:
    """Why these weights cannot be packed, or None."""
    if len(biases) not in (0, len(weights)):
        return UNLIKE
    if why := why_unlike(weights, biases or [None] * len(weights)):
        return why
    everything = [*weights, *biases]
    if len({id(w) for w in everything}) < len(everything) or not all(
        map(_owns_storage, everything)
    ):
        return SHARED
    return None


def why_unlike(weights: Sequence[Any], biases: Sequence[Any]) -> str | None:
    """Why weights of these shapes, dtypes and devices cannot be packed, or None."""
    first = weights[0]
    if first.device.type not in ("cpu", "cuda"):
        return f"weights on {first.device.type}"
    step = buffers.ALIGNMENT if first.device.type == "cuda" else CPU_ALIGNMENT
    bias = biases[0] is not None
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        if w.dtype != first.dtype or w.device != first.device or w.shape[1] != first.shape[1]:
            return UNLIKE
        if (b is not None) != bias:
            return UNLIKE
        if b is not None and (type(b) is not nn.Parameter or b.dtype != first.dtype):
            return UNLIKE
        # cuBLASLt chooses a kernel by alignment: each slice must keep that of an allocation
        last = i == len(weights) - 1
        sizes = [t.numel() * t.element_size() for t in (w, b) if t is not None]
        if not last and any(size % step for size in sizes):
            return f"the size of a weight is not a multiple of {step} bytes"
    return None


def _owns_storage(weight: Any) -> bool:
    """Whether a weight fills its storage, and nothing else refers to that storage."""
    if type(weight.data) is not Tensor or weight.is_inference() or not weight.is_contiguous():
        return False
    if not weight.is_cuda and (weight.is_shared() or weight.is_pinned()):
        return False  # shared with other processes, or pinned for copies to a GPU
    storage = weight.untyped_storage()
    fills = storage.nbytes() == weight.nbytes > 0
    # two references: the weight, and the local `storage`
    return fills and torch_internals.storage_uses(storage._cdata) == 2


def _release_cached_memory(weight: Any) -> None:
    """Return the allocator's cached memory where memory is short: it would cut the block out of
    segments that activations or previously packed weights have left, and keep the remainders.
    Without this Llama-3-8B held 23.1 GiB on an H200, where eager held 20.0. Freeing and allocating
    these segments again took 6 s of the first forward of LTX-2, whose 48 blocks have 6 groups of
    layers each, so it is done only where less than PLENTY of the GPU is free."""
    if weight.is_cuda:
        free, total = torch.cuda.mem_get_info(weight.device)
        if free < PLENTY * total:
            torch.cuda.empty_cache()


def _move_into_block(parts: list[Any]) -> Tensor:
    """Make the memory of parameters slices of one new block; returns the block."""
    block = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:])).detach()
    torch.cat([p.detach() for p in parts], out=block)
    slices = block.split_with_sizes(list(map(len, parts)))
    for part, piece in zip(parts, slices, strict=True):
        # DLPack gives a slice a storage of its own, which keeps the block alive: accelerate saves
        # only one of several weights that share a storage
        part.data = dlpack.from_dlpack(dlpack.to_dlpack(piece))
    return block
