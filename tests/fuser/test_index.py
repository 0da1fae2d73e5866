"""Index arithmetic: reshapes regroup variables, and say so where a variable has to be split."""

import itertools

import pytest

from kernelwright.fuser.index import Affine, CannotIndex, Space, Split, dense


def values(space, index):
    """An index for all values of the variables, in their order."""
    names = list(space.extents)
    found = []
    for chosen in itertools.product(*(range(e) for e in space.extents.values())):
        at = dict(zip(names, chosen, strict=True))
        found.append(index.constant + sum(c * at[n] for n, c in index.terms))
    return found


def test_sums_and_multiples():
    i, j = Affine(0, (("i", 1),)), Affine(2, (("j", 3),))
    assert i + j * 2 == Affine(4, (("i", 1), ("j", 6)))
    assert i + i * -1 == Affine()
    assert str(j + i) == "i + 3*j + 2"
    assert (j + i).without("j", 4) == Affine(14, (("i", 1),))


def test_a_reshape_regroups_dimensions():
    space = Space()
    index = [space.new(4), space.new(3), space.new(8)]
    number = space.ravelled(index, (4, 3, 8))
    assert values(space, number) == list(range(96))
    merged = space.unravelled(number, (4, 24))
    assert values(space, merged[0]) == [n // 24 for n in range(96)]
    assert values(space, merged[1]) == [n % 24 for n in range(96)]


def test_a_dimension_of_one_needs_no_variable():
    space = Space()
    assert space.new(1) == Affine()
    assert not space.extents


def test_a_variable_that_spans_two_dimensions_is_split():
    space = Space({"i": 24})
    with pytest.raises(Split) as found:
        space.unravelled(Affine(0, (("i", 1),)), (3, 8))
    assert (found.value.name, found.value.inner) == ("i", 8)


def test_what_no_split_makes_affine_is_refused():
    space = Space({"i": 12})
    with pytest.raises(CannotIndex):
        space.unravelled(Affine(1, (("i", 1),)), (2, 8))


def test_dense_strides():
    assert dense((2, 3, 4)) == (12, 4, 1)
