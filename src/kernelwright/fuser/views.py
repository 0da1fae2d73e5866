"""Views as index arithmetic: which element of the viewed tensor an element of a view is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .index import Affine, Space

aten: Any = torch.ops.aten
Index = tuple[Affine, ...]


def packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# views: (space, node, index) -> (the viewed node, the index there)

Viewed = tuple[fx.Node, Index]


def _reshaped(space: Space, node: fx.Node, index: Index) -> Viewed:
    source = node.args[0]
    number = space.ravelled(index, shape_of(node))
    return source, tuple(space.unravelled(number, shape_of(source)))


def _permuted(space: Space, node: fx.Node, index: Index) -> Viewed:
    source, order = node.args
    back: list[Affine] = [Affine()] * len(index)
    for here, there in zip(index, order, strict=True):
        back[there % len(index)] = here
    return source, tuple(back)


def _transposed(space: Space, node: fx.Node, index: Index) -> Viewed:
    source, a, b = (*node.args, 0, 1)[:3]
    back = list(index)
    if len(back) > 1:
        a, b = a % len(back), b % len(back)
        back[a], back[b] = back[b], back[a]
    return source, tuple(back)


def _unsqueezed(space: Space, node: fx.Node, index: Index) -> Viewed:
    source, dim = node.args
    dim %= len(index)
    return source, index[:dim] + index[dim + 1 :]


def _expanded(space: Space, node: fx.Node, index: Index) -> Viewed:
    source = node.args[0]
    shape = shape_of(source)
    taken = index[len(index) - len(shape) :]
    return source, tuple(Affine() if n == 1 else i for n, i in zip(shape, taken, strict=True))


def _sliced(space: Space, node: fx.Node, index: Index) -> Viewed:
    source, dim, start, _, step = (*node.args, *(0, 0, None, None, 1)[len(node.args) - 1 :])[:5]
    dim %= len(index)
    start = start_of(start, shape_of(source)[dim])
    return source, (*index[:dim], index[dim] * (step or 1) + start, *index[dim + 1 :])


def _selected(space: Space, node: fx.Node, index: Index) -> Viewed:
    source, dim, number = node.args
    shape = shape_of(source)
    dim %= len(shape)
    return source, (*index[:dim], Affine(number % shape[dim]), *index[dim:])


def _same(space: Space, node: fx.Node, index: Index) -> Viewed:
    return node.args[0], index


def start_of(start: int | None, size: int) -> int:
    start = start or 0
    return max(start + size, 0) if start < 0 else min(start, size)


VIEWS: dict[Any, Callable[[Space, fx.Node, Index], Viewed]] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.squeeze), _reshaped),
    **dict.fromkeys((aten.unflatten, aten.flatten), _reshaped),
    aten.permute: _permuted,
    **dict.fromkeys((aten.transpose, aten.t), _transposed),
    aten.unsqueeze: _unsqueezed,
    aten.expand: _expanded,
    aten.slice: _sliced,
    aten.select: _selected,
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh_copy), _same),
}


def _of_split(node: fx.Node, source: fx.Node, number: int, index: Index) -> Viewed:
    x, sizes, dim = (*source.args, 0)[:3]
    dim %= len(index)
    start = sizes * number if isinstance(sizes, int) else sum(sizes[:number])
    return x, (*index[:dim], index[dim] + start, *index[dim + 1 :])


def _of_unbind(node: fx.Node, source: fx.Node, number: int, index: Index) -> Viewed:
    x, dim = (*source.args, 0)[:2]
    dim %= len(shape_of(x))
    return x, (*index[:dim], Affine(number), *index[dim:])


PARTS: dict[Any, Callable[[fx.Node, fx.Node, int, Index], Viewed]] = {
    **dict.fromkeys((aten.split, aten.split_with_sizes), _of_split),
    aten.unbind: _of_unbind,
}


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
