"""The memory of a captured forward, and the way of tensors into and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree

PLAIN_TYPES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
TENSOR_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# cuBLASLt chooses a kernel by the alignment of its operands, up to this many bytes
ALIGNMENT = 256


class Refusal(Exception):
    """Why a call runs without a graph."""


class Room:
    """Memory with the layout and alignment of a tensor, for the tensors of later calls."""

    def __init__(self, like: Tensor) -> None:
        lead = alignment(like) // like.element_size()
        # it is written in every mode, so it must not become an inference tensor
        with torch.inference_mode(False):
            whole = torch.empty(lead + _span(like), dtype=like.dtype, device=like.device)
            self.tensor = _placed(whole, lead, like)
        self._dense = _is_dense(like)

    def fill(self, given: Tensor) -> None:
        if self._dense:
            self.tensor.copy_(given)
        else:
            # elements that share an address, as in an expanded tensor, cannot be written one by one
            _bytes(self.tensor).copy_(_bytes(given))


class Results:
    """What a captured forward returned, and how each call gets its own copy of it.

    Tensors that share memory share it in the copy too. An input that was returned, or a view of
    it, is given as the caller's own tensor; a weight is given as the weight.
    """

    def __init__(self, result: Any, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self._leaves, self._structure = pytree.tree_flatten(result, is_leaf=is_no_container)
        given = {_storage(t): i for i, t in enumerate(inputs) if t.numel()}
        lasting = {_storage(w) for w in weights if w.numel()}
        self._views: list[tuple[Tensor, int]] = []
        groups: dict[Any, list[Tensor]] = {}
        for leaf in {id(x): x for x in self._leaves if not isinstance(x, PLAIN_TYPES)}.values():
            _check(leaf, inputs[0].device)
            where = _storage(leaf) if leaf.numel() else (id(leaf),)
            if where in given:
                self._views.append((leaf, given[where]))
                _check_view(leaf, inputs[given[where]])
            elif where not in lasting:
                groups.setdefault(where, []).append(leaf)
        self._copies = [(_window(group), group) for group in groups.values()]

    def give(self, inputs: Sequence[Tensor]) -> Any:
        """The results of the last replay, whose inputs were these."""
        new: dict[int, Tensor] = {}
        for leaf, i in self._views:
            new[id(leaf)] = inputs[i] if leaf is self._inputs[i] else self._view(leaf, i, inputs[i])
        for (source, start), group in self._copies:
            copy = source.clone()
            for leaf in group:
                new[id(leaf)] = (
                    copy if source is leaf else _placed(copy, _offset(leaf) - start, leaf)
                )
        return pytree.tree_unflatten([new.get(id(x), x) for x in self._leaves], self._structure)

    def _view(self, leaf: Tensor, index: int, given: Tensor) -> Tensor:
        offset = _offset(leaf) - _offset(self._inputs[index])
        return given.as_strided(leaf.shape, leaf.stride(), _offset(given) + offset)


def is_no_container(value: Any) -> bool:
    """Containers are taken apart if they hold values and no more. Other classes, such as a cache of
    keys and values, may be written to in ways that a replay would not repeat."""
    return not isinstance(value, tuple | list | dict)


def alignment(tensor: Tensor) -> int:
    """Bytes past a multiple of ALIGNMENT. A single element, such as the timestep that a loop takes
    out of a table, is read in the same way wherever it lies."""
    if tensor.numel() < 2 or not (tensor.is_contiguous() or _span(tensor) > 1):
        return 0
    return tensor.data_ptr() % ALIGNMENT


def is_simple(tensor: Tensor) -> bool:
    """Whether memory and strides say everything about a tensor."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _check(leaf: Any, device: torch.device) -> None:
    if type(leaf) not in TENSOR_TYPES:
        raise Refusal(f"an output of type {type(leaf).__name__}")
    if leaf.device != device:
        raise Refusal(f"an output on {leaf.device}")
    if not is_simple(leaf):
        raise Refusal("an output that is sparse, conjugated or negated")
    if leaf.requires_grad and leaf.grad_fn is not None:
        raise Refusal("an output with a gradient")


def _check_view(leaf: Tensor, given: Tensor) -> None:
    if leaf.dtype != given.dtype:
        raise Refusal("an output that is an input seen as another dtype")


def _span(tensor: Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, both included."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _is_dense(tensor: Tensor) -> bool:
    """Whether every address between the first and the last element belongs to one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _placed(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor with the layout of `like`, so many elements into the storage of `memory`."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(memory.untyped_storage(), offset, like.shape, like.stride())


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes from the first element to the last."""
    start = _offset(tensor)
    return _range(tensor, start, start + _span(tensor))


def _range(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The bytes of a storage, between two offsets in elements of `tensor`."""
    size = tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start * size, ((stop - start) * size,), (1,))


def _window(group: list[Tensor]) -> tuple[Tensor, int]:
    """The memory to copy for tensors that share a storage, and where it starts."""
    first = group[0]
    if len(group) == 1 and _is_dense(first) and first.data_ptr() % ALIGNMENT == 0:
        return first, 0
    if any(leaf.dtype != first.dtype for leaf in group):
        raise Refusal("outputs that share memory and differ in dtype")
    start = min(map(_offset, group)) // ALIGNMENT * ALIGNMENT
    return _range(first, start, max(_offset(leaf) + _span(leaf) for leaf in group)), start
