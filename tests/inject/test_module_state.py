"""A snapshot of a module holds until something changes that a forward reads from Python."""

import copy

import pytest
import torch
from torch import nn

from kernelwright.inject.state.module_state import State


class Thing:
    """An attribute that is compared by identity."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def root():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_another_object_at_the_address_of_the_last_is_another(root):
    layer = root[0]
    layer.thing = Thing()
    state, address = State(root), id(layer.thing)
    assert state.holds(root)
    del layer.thing
    others = []
    while not others or id(others[-1]) != address:
        assert len(others) < 10**6, "the address did not come again"
        others.append(Thing())
    layer.thing = others[-1]
    assert not state.holds(root)


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"scale": 2.0, "thing": Thing()}, lambda d: d.update(scale=3.0)),
        ({"scale": 2.0, "thing": Thing()}, lambda d: d.update(more=1)),
        ({"scale": 2.0}, lambda d: d.update(scale=3.0)),
        ([1, Thing(), 3], lambda d: d.__setitem__(2, 4)),
        ([1, Thing(), 3], lambda d: d.pop()),
        ({1, 2}, lambda d: d.add(3)),
        ({"first": 1, "second": 2}, lambda d: d.update(first=d.pop("first"))),
    ],
)
def test_a_plain_value_in_a_container_counts(root, values, change):
    root[0].values = values
    state = State(root)
    assert state.holds(root)
    change(values)
    assert not state.holds(root)


def test_what_has_no_value_to_compare_in_a_container_does_not_count(root):
    root[0].values = values = [1, Thing()]
    state = State(root)
    values[1] = Thing()
    assert state.holds(root)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.register_parameter("bias", None),
        lambda layer: layer._parameters.__setitem__("bias", torch.zeros(4)),
        lambda layer: layer.register_buffer("more", torch.zeros(4)),
    ],
)
def test_weights_of_another_class_or_dtype_count(root, change):
    state = State(root)
    root[0].weight.data = torch.randn(4, 4)  # their values and places do not
    assert state.holds(root)
    change(root[0])
    assert not state.holds(root)


def test_copying_a_processor_does_not_count(root):
    """Python adds `__slotnames__` to a class when the first of its objects is copied."""

    class Processor:
        def __call__(self, x):
            return x

    root.processor = Processor()
    state = State(root)
    copy.deepcopy(root)
    assert "__slotnames__" in vars(Processor)
    assert state.holds(root)
    Processor.__call__ = lambda self, x: -x
    assert not state.holds(root)
