"""What decides how a forward runs is in the signature of its inputs, and nothing else is."""

import pytest
import torch

from kernelwright.inject.runtime.input_key import (
    has_state,
    in_words,
    number_of,
    on_meta,
    signature,
    versions,
)

X = torch.ones(2, 3)


def of(*args, **kwargs):
    return signature(args, kwargs)


ALIKE = {
    "other values": (of(X), of(X * 2)),
    "other strides": (of(X), of(torch.ones(3, 2).t())),
    "other numbers": (of(X, 1, 0.5), of(X, 2, 0.25)),
    "a longer mask": (of(X, mask=torch.ones(1, 4)), of(X, mask=torch.ones(1, 5))),
    "objects of one class": (of(object()), of(object())),
    "a list for a tuple": (of([X, X]), of((X, X))),
}
APART = {
    "shape": (of(X), of(X[:1])),
    "dtype": (of(X), of(X.double())),
    "device": (of(X), of(X.to("meta"))),
    "class": (of(X), of(torch.nn.Parameter(X))),
    "number of arguments": (of(X), of(X, X)),
    "None": (of(X, None), of(X, X)),
    "True for False": (of(X, True), of(X, False)),
    "text": (of("a"), of("b")),
    "a number's class": (of(1), of(1.0)),
    "name": (of(a=X), of(b=X)),
    "by name": (of(X), of(a=X)),
    "order of names": (of(a=X, b=X[0]), of(b=X[0], a=X)),
    "inside a list": (of([X, X]), of([X, X[:1]])),
    "length of a list": (of([X]), of([X, X])),
    "inside a dict": (of({"a": X}), of({"a": X[:1]})),
    "key of a dict": (of({"a": X}), of({"b": X})),
    "dtype of a mask": (of(mask=X), of(mask=X.bool())),
    "dimensions of a mask": (of(mask=X), of(mask=X[0])),
    "no mask": (of(mask=X), of(mask=None)),
    "other classes": (of(object()), of(type)),
}


@pytest.mark.parametrize("what", ALIKE)
def test_inputs_are_alike_but_for(what):
    assert ALIKE[what][0] == ALIKE[what][1]
    assert hash(ALIKE[what][0]) == hash(ALIKE[what][1])


@pytest.mark.parametrize("what", APART)
def test_inputs_differ_in(what):
    assert APART[what][0] != APART[what][1]
    hash(APART[what][0]), hash(APART[what][1])


@pytest.mark.parametrize(
    "value", [X, 1, 0.5, True, "a", None, (X, 1), [X, [None]], {"a": X, "b": ({"c": 1},)}]
)
def test_plain_values_hold_no_state(value):
    assert not has_state((value,), {})
    assert not has_state((), {"name": value})


@pytest.mark.parametrize("value", [object(), (X, object()), [object()], {"a": object()}, {1, 2}])
def test_objects_may_hold_state(value):
    assert has_state((value,), {})
    assert has_state((X,), {"name": value})


def test_a_write_to_an_input_is_seen():
    x, y = torch.ones(2), torch.ones(2)
    before = versions((x,), {"y": [y]})
    assert versions((x,), {"y": [y]}) == before
    y.add_(1)
    assert versions((x,), {"y": [y]}) != before
    twins = torch.ones(2), torch.ones(2)  # of one version
    assert versions(twins[:1], {}) != versions(twins[1:], {})


def test_inference_tensors_count_no_writes():
    with torch.inference_mode():
        x = torch.ones(2)
    assert versions((x,), {}) == versions((x,), {})


def test_inputs_without_values():
    assert not on_meta((X,), {"a": 1})
    assert on_meta((X.to("meta"),), {})
    assert on_meta((X,), {"a": [1, X.to("meta")]})


def test_inputs_in_words():
    assert in_words((1, X.to(torch.bfloat16), X), {}) == "[2, 3] bfloat16"
    assert in_words((1,), {"x": X}) == "[2, 3] float32"
    assert in_words((), {"n": 1}) == "its inputs"


def test_equal_keys_have_one_number():
    assert number_of(of(X)) == number_of(of(X * 2))
    assert number_of(of(X)) != number_of(of(X.double()))
