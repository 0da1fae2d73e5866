"""A snapshot of a module holds until something changes that a forward reads from Python."""

import copy
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernelwright.inject.state.module_state import State


class Thing:
    """An attribute that is compared by identity."""

    __slots__ = ("__weakref__",)


SCALE = 2.0


def scaled(x):
    return twice(x) * SCALE


def twice(x):
    return x * 2


class Layer(nn.Module):
    OPTIONS = {"bias": 1.0}  # noqa: RUF012

    def forward(self, x):
        return self.step(x)

    def step(self, x):
        return scaled(x) + self.OPTIONS["bias"]


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


@pytest.mark.parametrize("old", [Thing(), torch.zeros(2), {"scale": 1}, [[1]], nn.ReLU()])
def test_another_object_in_a_container_counts(root, old):
    root[0].values = values = [1, old]
    root[0].named = named = {"one": old, "two": {"inner": old}}
    state = State(root)
    assert state.holds(root)
    for container, key in ((values, 1), (named, "one"), (named["two"], "inner")):
        container[key] = None
        assert not state.holds(root)
        container[key] = old
        assert state.holds(root)


def test_what_comes_into_a_container_later_does_not_count(root):
    """Tables by the size of what is asked for."""
    root[0].tables = {4: torch.zeros(4)}
    root[0].seen = [torch.zeros(4)]
    state = State(root)
    root[0].tables[8] = torch.zeros(8)
    root[0].seen.append(torch.zeros(8))
    assert state.holds(root)


def test_settings_inside_of_settings_and_containers_count(root):
    inner = SimpleNamespace(scale=1, parts=[1, 2])
    root[0].config = SimpleNamespace(inner=inner, more={"inner": [inner]})
    root[1].kinds = [SimpleNamespace(scale=1)]
    state = State(root)
    for change, back in (
        (lambda: setattr(inner, "scale", 2), lambda: setattr(inner, "scale", 1)),
        (lambda: inner.parts.append(3), lambda: inner.parts.pop()),
        (
            lambda: setattr(root[1].kinds[0], "scale", 2),
            lambda: setattr(root[1].kinds[0], "scale", 1),
        ),
    ):
        change()
        assert not state.holds(root)
        back()
        assert state.holds(root)
    root[0].config.inner = SimpleNamespace(scale=1, parts=[1, 2])
    assert not state.holds(root)


def test_what_counts_or_logs_is_no_setting(root):
    root[0].config = SimpleNamespace(log=SimpleNamespace(lines=0, lock=threading.Lock()))
    state = State(root)
    root[0].config.log.lines = 1
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


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (Layer.OPTIONS, "bias", 2.0),
        (vars(sys.modules[__name__]), "SCALE", 3.0),
        (vars(sys.modules[__name__]), "scaled", lambda x: x),
        (vars(sys.modules[__name__]), "twice", lambda x: x),
    ],
    ids=["a container of the class", "a global number", "a helper", "a helper's helper"],
)
def test_what_a_forward_reads_outside_of_the_module_counts(holder, name, value, monkeypatch):
    layer = Layer()
    state = State(layer)
    assert state.holds(layer)
    with monkeypatch.context() as changed:
        changed.setitem(holder, name, value)
        assert not state.holds(layer)
        assert State(layer).holds(layer)
    assert state.holds(layer)
