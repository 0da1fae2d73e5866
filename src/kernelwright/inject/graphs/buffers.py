"""The memory of a captured forward: copying inputs in, and results out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree, unowned_storage

PLAIN_TYPES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
TENSOR_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# cuBLASLt chooses a kernel by the alignment of its operands, up to this many bytes
ALIGNMENT = 256
# bytes up to which starting a copy takes longer than copying: of a training step of LTX-Video with
# adapters on an H200, 448 of 619 copies were gradients of 64 KiB
SMALL = 1 << 20


class Refusal(Exception):
    """Raised with the reason why a call runs without a graph."""


class CachePlace:
    """Stands for a cache of keys and values among results, so that those do not keep it alive."""

    def __init__(self, index: int) -> None:
        self.index = index


class InputBuffer:
    """Memory with the layout and alignment of an input, filled with the input of each call."""

    def __init__(self, like: Tensor) -> None:
        lead = alignment(like) // like.element_size()
        self._dense, self._span = _is_dense(like), _span(like)
        # calls outside inference mode fill it too, which an inference tensor would not allow
        with torch.inference_mode(False):
            memory = torch.empty(lead + self._span, dtype=like.dtype, device=like.device)
            self.tensor = _view_of(memory, lead, like)
            self._elements = memory[lead:]

    def fill(self, given: Tensor) -> None:
        if self._dense:
            self.tensor.copy_(given)
        else:
            # copy_ refuses elements that share an address, as in an expanded tensor: copy the
            # memory from the first to the last
            self._elements.copy_(given.as_strided((self._span,), (1,)))


class Results:
    """What a captured forward returned, of which each call gets its own copy.

    Tensors that share memory share it in the copy too. If the forward returns an input, or a view
    of one, the caller gets their own tensor, or a view of it; a weight is returned as it is, and so
    is a cache of keys and values that is an input. Without `owned` the memory of the results is not
    kept from graphs that are captured later: it has to be copied before one of those is replayed.
    """

    def __init__(
        self,
        result: Any,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        caches: Sequence[Any] = (),
        owned: bool = True,
    ) -> None:
        self._inputs = inputs
        leaves, self._structure = pytree.tree_flatten(result, is_leaf=is_leaf)
        of_inputs = {_storage(t): i for i, t in enumerate(inputs) if t.numel()}
        of_weights = {_storage(w) for w in weights if w.numel()}
        if not owned:
            leaves = _unowned(leaves, {*of_inputs, *of_weights})
        places = {id(cache): CachePlace(i) for i, cache in enumerate(caches)}
        self._places = list(places.values())
        self._leaves = [places.get(id(leaf), leaf) for leaf in leaves]
        self._views: list[tuple[Tensor, int]] = []
        groups: dict[Any, list[Tensor]] = {}
        known = (*PLAIN_TYPES, CachePlace)
        for leaf in {id(x): x for x in self._leaves if not isinstance(x, known)}.values():
            _check(leaf, inputs[0].device)
            storage = _storage(leaf) if leaf.numel() else (id(leaf),)
            if storage in of_inputs:
                self._views.append((leaf, of_inputs[storage]))
                _check_view(leaf, inputs[of_inputs[storage]])
            elif storage not in of_weights:
                groups.setdefault(storage, []).append(leaf)
        self._copies = [(_window(group), group) for group in groups.values()]
        small: dict[torch.dtype, list[int]] = {}
        for number, ((source, _), _) in enumerate(self._copies):
            if source.nbytes <= SMALL:
                small.setdefault(source.dtype, []).append(number)
        self._together = [numbers for numbers in small.values() if len(numbers) > 1]

    def copies(self, inputs: Sequence[Tensor], caches: Sequence[Any] = ()) -> Any:
        """The results of the last replay, for a caller who passed these inputs."""
        new: dict[int, Any] = {id(place): caches[place.index] for place in self._places}
        for leaf, i in self._views:
            new[id(leaf)] = inputs[i] if leaf is self._inputs[i] else self._view(leaf, i, inputs[i])
        for copy, (source, start), group in self._copied():
            for leaf in group:
                new[id(leaf)] = (
                    copy if source is leaf else _view_of(copy, _offset(leaf) - start, leaf)
                )
        return pytree.tree_unflatten([new.get(id(x), x) for x in self._leaves], self._structure)

    def _copied(self) -> Iterator[tuple[Tensor, tuple[Tensor, int], list[Tensor]]]:
        """Each copy, what it is a copy of, and the results that lie there; small ones are made by
        one kernel."""
        made: dict[int, Tensor] = {}
        for numbers in self._together:
            sources = [self._copies[i][0][0] for i in numbers]
            found = list(map(torch.empty_like, sources))
            torch._foreach_copy_(found, sources)
            made.update(zip(numbers, found, strict=True))
        for number, ((source, start), group) in enumerate(self._copies):
            copy = made[number] if number in made else source.clone()
            yield copy, (source, start), group

    def _view(self, leaf: Tensor, index: int, given: Tensor) -> Tensor:
        offset = _offset(leaf) - _offset(self._inputs[index])
        return given.as_strided(leaf.shape, leaf.stride(), _offset(given) + offset)


def is_leaf(value: Any) -> bool:
    """Whether pytree is to leave a value whole: anything but a plain container. A replay would not
    repeat writes to other objects, such as a cache of keys and values."""
    return not isinstance(value, tuple | list | dict)


def alignment(tensor: Tensor) -> int:
    """Bytes past a multiple of ALIGNMENT. It does not matter for a single element, such as the
    timestep that a loop takes from a table."""
    if tensor.numel() < 2 or not (tensor.is_contiguous() or _span(tensor) > 1):
        return 0
    return tensor.data_ptr() % ALIGNMENT


def is_simple(tensor: Tensor) -> bool:
    """Whether memory, shape and strides describe a tensor completely."""
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
        raise Refusal("an output that views an input as another dtype")


def _span(tensor: Tensor) -> int:
    """Number of elements of memory from the first to the last element, both included."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
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


def _view_of(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor with the layout of `like`, `offset` elements into the storage of `memory`."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(memory.untyped_storage(), offset, like.shape, like.stride())


def _unowned(leaves: Sequence[Any], others: set[int]) -> list[Any]:
    """The same, with tensors that do not own their memory, unless it is that of others."""
    new: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() and _storage(leaf) not in others:
            memory = leaf.untyped_storage()
            seen = unowned_storage(memory.data_ptr(), leaf.device, memory.nbytes())
            empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            new[id(leaf)] = empty.set_(seen, _offset(leaf), leaf.shape, leaf.stride())
    return [new.get(id(leaf), leaf) for leaf in leaves]


def _range(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The bytes of a tensor's storage between two offsets, counted in its elements."""
    size = tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start * size, ((stop - start) * size,), (1,))


def _window(group: list[Tensor]) -> tuple[Tensor, int]:
    """The memory to copy for tensors that share a storage, and its offset in elements."""
    first = group[0]
    if len(group) == 1 and _is_dense(first) and first.data_ptr() % ALIGNMENT == 0:
        return first, 0
    if any(leaf.dtype != first.dtype for leaf in group):
        raise Refusal("outputs that share memory and differ in dtype")
    start = min(map(_offset, group)) // ALIGNMENT * ALIGNMENT
    return _range(first, start, max(_offset(leaf) + _span(leaf) for leaf in group)), start
