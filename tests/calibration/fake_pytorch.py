"""A PyTorch whose F.rms_norm sums in an order of choice, on the CPU."""

import torch
import torch.nn.functional as F

from kernelwright.calibration.trees import Tree, tree_of


def reversed_tree(width):
    """From the last element to the first: an order that no PyTorch has had."""
    tree = Tree(width)
    tree.fold(list(range(width))[::-1])
    return tree


def sums_by(monkeypatch, tree):
    """F.rms_norm with the tree of a width and an element's size."""

    def rms_norm(x, shape, weight=None, eps=None):
        v, (width,) = x.float(), shape
        total = tree(width, x.dtype.itemsize).sum(v * v, squares_of=v)
        y = v * torch.rsqrt(total / width + torch.tensor(eps, dtype=torch.float32))[:, None]
        return (y if weight is None else y * weight.float()).to(x.dtype)

    monkeypatch.setattr(F, "rms_norm", rms_norm)


def sums_as(monkeypatch, way):
    sums_by(monkeypatch, lambda width, size: tree_of("F.rms_norm", way, width, 999, size))
