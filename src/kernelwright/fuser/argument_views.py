"""How arguments of ops lie in the tensors that they are views of, and how to take them there.

A view is taken in one call from the tensor in memory, however many views of views were recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from .building import Builder
from .expression import Load
from .index import Affine, Space
from .steps_apart import Values


def layout(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride())


def lies_in(node: fx.Node, base: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes and strides of a view when the graph was recorded, and where in its base it begins."""
    size, strides = layout(node)
    # the graph has sizes and strides of a view, but not where it begins
    first = Builder(Space(), {base}).at(node, (Affine(),) * len(size))
    assert isinstance(first, Load)
    _, steps = layout(base)
    offset = sum(i.constant * s for i, s in zip(first.index, steps, strict=True))
    return size, strides, offset


def view(
    place: int, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Callable[[Values], Tensor]:
    """A view of a value."""
    if offset == 0:
        return lambda values: values[place].as_strided(size, strides)

    def shifted(values: Values) -> Tensor:
        whole = values[place]
        return whole.as_strided(size, strides, whole.storage_offset() + offset)

    return shifted
