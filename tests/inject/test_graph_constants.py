"""What of a forward is made of no input, and so the same at every replay."""

import torch

from kernelwright.inject.graphs.constants import Constants


def watched(run, *given):
    with Constants() as constants:
        made = run(*given)
    return [constants.has([t]) for t in made]


def test_what_a_forward_counts_by_itself_is_constant():
    def run(x):
        counted = torch.arange(x.shape[1]) + 3
        return counted, counted[None].expand(2, -1), counted.diff(), torch.zeros(2)

    assert watched(run, torch.randn(2, 5)) == [True] * 4


def test_what_is_made_of_an_input_is_not():
    def run(x):
        counted = torch.arange(5)
        return x, x[0], counted + x, torch.where(counted > 2, x, 0)

    assert watched(run, torch.randn(5)) == [False] * 4


def test_what_an_input_is_written_into_is_not():
    def run(x):
        whole, part, kept = torch.zeros(5), torch.zeros(5), torch.zeros(5)
        whole.copy_(x)
        part[1:].add_(x[1:])
        return whole, part, kept.add_(1)

    assert watched(run, torch.randn(5)) == [False, False, True]


def test_memory_that_a_kernel_without_an_op_may_fill_is_not():
    def run(x):
        counted = torch.arange(5)
        made = [torch.empty(5), torch.empty_like(counted), counted.new_empty(5)]
        made[0].numpy()[:] = x.numpy()  # as a kernel that is launched by us
        return [*made, made[0] + counted]

    assert watched(run, torch.randn(5)) == [False] * 4


def test_random_numbers_are_not():
    assert watched(lambda: [torch.rand(3), torch.zeros(3).normal_()]) == [False, False]


def test_nothing_is_once_python_has_read_an_input():
    def run(x):
        before = torch.arange(3)
        return [before + 1, torch.full((2,), x.sum().item())]

    assert watched(run, torch.randn(5)) == [False, False]
    assert watched(lambda: [torch.full((2,), torch.arange(3).sum().item())]) == [True]
    assert watched(lambda x: [x.nonzero(), torch.arange(3)], torch.ones(3)) == [False, False]
