"""Linear layers that are given the same input, with their weights side by side in memory.

Query, key and value are then one product, and so are the two projections of a gated feed-forward.
The weights stay the parameters they were: same names, shapes and values. Only their memory is
other: slices of one block, each with a storage of its own, so that saving, copying or moving one of
them sees that one alone. The block lives as long as one of its slices, and nothing is kept beside
them. Whether they still lie in it is asked of their addresses at every call, so a weight that was
moved, swapped or loaded anew is seen, and they are packed again.
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

# PyTorch's own allocations on the CPU start at multiples of this
CPU_ALIGNMENT = 64
# weights that leave their block after fewer than CALLS calls, and LIMIT times so, belong to
# somebody who moves them about, such as group offload
CALLS, LIMIT = 8, 3
# who compiles a model holds on to one weight or another while it first runs
TRIES = 3

SHARED = "one of its weights shares its memory"
UNLIKE = "its layers differ in dtype, device, input or bias"
MOVED = "its weights are moved about"


class Packed(NamedTuple):
    """The weights of several layers as one: [sum of outputs, inputs], and the bias or None."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]


@dataclass
class _Group:
    """What is known of layers that belong together."""

    facts: Any = None  # of the weights as they were packed, or found not to be for it
    why: str | None = None  # why they are not packed
    blocks: tuple[TensorWeakRef, ...] = ()
    sizes: tuple[int, ...] = ()
    calls: int = 0
    moved: int = 0
    tries: int = 0  # how often they were found to share their memory

    @property
    def settled(self) -> bool:
        return self.why != SHARED or self.tries >= TRIES


_groups: WeakKeyDictionary[nn.Module, _Group] = WeakKeyDictionary()
# the same by the memory of their first weight, for a compiled graph, which is given weights alone
_of_weights: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()
_PARAMETER = frozenset((nn.Parameter,))


def packed(layers: Sequence[nn.Linear], x: Tensor) -> Packed | str:
    """Plain linear layers as one for `x`, or why they are not. If they may be packed now, they
    are."""
    own = [layer._parameters for layer in layers]  # the way through the attribute takes longer
    weights: list[Any] = [p["weight"] for p in own]
    biases: list[Any] = [b for p in own if (b := p["bias"]) is not None]
    group = _groups.get(layers[0])
    if group is None:
        group = _groups[layers[0]] = _group_of(weights[0])
    return _packed(group, weights, biases, x)


def packed_weights(weights: list[Any], biases: list[Any], x: Tensor) -> Packed | str:
    """The same of layers that are known by their weights alone."""
    return _packed(_group_of(weights[0]), weights, biases, x)


def _group_of(weight: Any) -> _Group:
    buffers = weight.untyped_storage()
    found = _of_weights.get(buffers)
    if found is None:
        with _lock:
            found = _of_weights.setdefault(buffers, _Group())
    return found


def _packed(group: _Group, weights: list[Any], biases: list[Any], x: Tensor) -> Packed | str:
    first = weights[0]
    if type(x) is not Tensor or not _PARAMETER.issuperset(map(type, weights)):
        return "tensors of a class of their own"
    if x.dtype is not first.dtype or x.device != first.device:
        return "its dtype or device changes"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
        return "gradients are recorded"
    mixed = torch_internals.any_autocast() and torch.is_autocast_enabled(x.device.type)
    if mixed or torch_internals.in_jit_trace():
        return "its weights are read in another way"
    blocks = _blocks(group, weights + biases)
    if blocks is None or not group.settled:
        if group.moved >= LIMIT:
            return MOVED
        if why := not_now(x.device):
            return why
        with _lock:
            blocks = _blocks(group, weights + biases)
            if blocks is None or not group.settled:
                blocks = _pack(group, weights, biases)
                _of_weights[first.untyped_storage()] = group
    if group.why is not None:
        return group.why
    group.calls += 1
    return Packed(blocks[0], blocks[1] if biases else None, group.sizes)


def not_now(device: torch.device) -> str | None:
    """Why no weight may be given other memory at this moment."""
    if capturing() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "a graph was recorded before it had run once"
    if torch_internals.dispatch_modes():
        return "something looks on at every operation"
    if torch_internals.warms_up_cudagraphs(device):
        return "torch.compile is about to record a graph"
    return None


def _facts(weights: list[Any]) -> Any:
    """Where weights lie, and how they are read."""
    return [(w.data_ptr(), w.shape, w.stride(), w.dtype) for w in weights]


def _blocks(group: _Group, weights: list[Any]) -> list[Any] | None:
    """The blocks of weights that are as they were left, or None."""
    if group.facts != _facts(weights):
        return None
    blocks = []
    for reference in group.blocks:
        # other memory may have come to lie at the same address
        if (block := reference()) is None:
            return None
        blocks.append(block)
    return blocks


def _pack(group: _Group, weights: list[Any], biases: list[Any]) -> list[Tensor]:
    if group.blocks:
        group.moved += group.calls < CALLS
    blocks: list[Tensor] = []
    group.why = _unfit(weights, biases)
    group.tries = group.tries + 1 if group.why == SHARED else 0
    if group.moved >= LIMIT:
        group.why = MOVED
    if group.why is None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                _make_room(weights[0])
                blocks = [_side_by_side(parts) for parts in (weights, biases) if parts]
        except torch.OutOfMemoryError:
            group.why = "there was no memory to pack its weights"
        if weights[0].is_cuda:  # in place for whichever stream comes next
            torch.cuda.current_stream(weights[0].device).synchronize()
        relocated()
    group.blocks, group.calls = tuple(map(TensorWeakRef, blocks)), 0
    group.sizes = tuple(map(len, weights))
    group.facts = _facts(weights + biases)
    return blocks


def _unfit(weights: list[Any], biases: list[Any]) -> str | None:
    """Why these weights cannot lie side by side, or None if they can."""
    if len(biases) not in (0, len(weights)):
        return UNLIKE
    if why := unlike(weights, biases or [None] * len(weights)):
        return why
    everything = [*weights, *biases]
    if len({id(w) for w in everything}) < len(everything) or not all(map(_is_alone, everything)):
        return SHARED
    return None


def unlike(weights: Sequence[Any], biases: Sequence[Any]) -> str | None:
    """Why weights of these sizes and dtypes cannot lie side by side, or None if they can."""
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
        # cuBLASLt chooses a kernel by the alignment of its operands: each alone must keep its own
        last = i == len(weights) - 1
        sizes = [t.numel() * t.element_size() for t in (w, b) if t is not None]
        if not last and any(size % step for size in sizes):
            return f"one of its weights is no multiple of {step} bytes"
    return None


def _is_alone(weight: Any) -> bool:
    """Whether a weight is all that lies in its memory, and nobody else holds on to that."""
    if type(weight.data) is not Tensor or weight.is_inference() or not weight.is_contiguous():
        return False
    if not weight.is_cuda and (weight.is_shared() or weight.is_pinned()):
        return False  # with other processes, or with copies to a GPU
    storage = weight.untyped_storage()
    whole = storage.nbytes() == weight.nbytes > 0
    # one use is the weight, the other the name `storage`
    return whole and torch_internals.storage_uses(storage._cdata) == 2


def _make_room(weight: Any) -> None:
    """Give back what the allocator holds in reserve: it would cut the block out of what activations
    or weights that were packed before have left, and then keep the rest. Without this Llama-3-8B
    held 23.1 GiB on an H200, where eager held 20.0."""
    if weight.is_cuda:
        torch.cuda.empty_cache()


def _side_by_side(parts: list[Any]) -> Tensor:
    """Give parameters slices of one new block for their memory; returns the block."""
    block = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:])).detach()
    torch.cat([p.detach() for p in parts], out=block)
    slices = block.split_with_sizes(list(map(len, parts)))
    for part, piece in zip(parts, slices, strict=True):
        # through DLPack a slice gets a storage of its own, which keeps the block alive: accelerate
        # drops all but one of the weights in a storage when it saves them
        part.data = dlpack.from_dlpack(dlpack.to_dlpack(piece))
    return block
