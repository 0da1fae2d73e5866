"""linear: what one process has chosen, later ones do not try again, but compare."""

import json

import pytest
import torch
import torch.nn.functional as F
from cublaslt_on_cpu import Known, decided, operands

from kernelwright.ops.linear import algorithms, choosing, kept_choices
from kernelwright.ops.linear.algorithms import linear


@pytest.fixture
def another_process(pretend, monkeypatch):
    """Puts a library in place as a process that begins finds it: with an empty memory."""

    def begin(*known, **facts):
        library = pretend(*known, **facts)
        monkeypatch.setattr(choosing, "_forgotten", False)
        return library

    return begin


def called(given, times=2):
    for _ in range(times):
        assert torch.equal(linear(*given), F.linear(*given))


def test_the_winner_is_launched_once_to_compare_it(another_process):
    given, ways = operands(), (Known(100), Known(80, workspace=512), Known(90))
    another_process(*ways)
    called(given)
    first = decided()
    library = another_process(*ways)
    called(given, 1)
    assert [number for number, _ in library.launched] == [1]
    called(given, 1)
    assert [number for number, _ in library.launched] == [1, 1]
    assert (decided().us, decided().torch_us) == (first.us, first.torch_us) == (80, 100)


@pytest.mark.parametrize("others", [(Known(99.9),), (Known(50, adds=1.0),)], ids=["slow", "wrong"])
def test_that_none_was_better_is_kept_too(another_process, others):
    given = operands()
    another_process(Known(100), *others)
    called(given)
    assert decided().way is None
    why = decided().why
    library = another_process(Known(100), *others)
    called(given)
    assert not library.launched
    assert decided().why == why


def test_one_that_has_other_bits_now_is_not_taken(another_process):
    given = operands()
    another_process(Known(100), Known(80), Known(90))
    called(given)
    library = another_process(Known(100), Known(80, adds=1.0), Known(90))
    called(given, 3)
    assert library.launched[-1][0] == 2
    another_process(Known(100), Known(80), Known(90))
    called(given, 1)
    assert decided().us == 90  # what was chosen then is kept instead


def test_one_that_cannot_compute_this_any_more_is_not_taken(another_process):
    given = operands()
    another_process(Known(100), Known(90), Known(80))
    called(given)
    library = another_process(Known(100), Known(90))
    called(given, 3)
    assert library.launched[-1][0] == 1


def elsewhere(another_process, ways):
    yield another_process(*ways, version=130_200), operands()
    yield another_process(*ways, capability=(9, 1)), operands(rows=(8,))
    library = another_process(*ways)
    yield library, operands(rows=(7,))
    yield library, operands(outputs=24)
    yield library, operands(bias=False)
    yield library, operands(dtype=torch.float16)


def test_other_libraries_and_products_are_tried_themselves(another_process, monkeypatch):
    ways = Known(100), Known(80)
    another_process(*ways)
    called(operands())
    for library, given in elsewhere(another_process, ways):
        library.launched.clear()
        linear(*given)
        assert len(library.launched) > 1, given[0].shape
    library = another_process(*ways)
    monkeypatch.setattr(choosing, "gpu", lambda device: "another GPU")
    called(operands(), 1)
    assert len(library.launched) > 1


def test_zeros_prove_nothing_of_a_kept_choice_either(another_process):
    ways = Known(100), Known(80)
    another_process(*ways)
    x, weight, bias = operands()
    called((x, weight, bias))
    library = another_process(*ways)
    called((torch.zeros_like(x), weight, bias))
    assert not library.launched


@pytest.mark.parametrize(
    "text", ["", "{}", '{"why": "", "torch_us": 1, "us": 1, "algorithm": "00"}']
)
def test_what_cannot_be_read_is_chosen_anew(another_process, text):
    ways, given = (Known(100), Known(80)), operands()
    another_process(*ways)
    called(given)
    (file,) = kept_choices.cache().folder.rglob("*.gemm")
    kept_choices.cache().write(file.stem, text.encode(), "gemm")
    library = another_process(*ways)
    called(given, 1)
    assert len(library.launched) > 1
    assert json.loads(kept_choices.cache().read(file.stem, "gemm"))["why"] == "faster"


def test_forget_chooses_again(another_process):
    ways, given = (Known(100), Known(80)), operands()
    another_process(*ways)
    called(given)
    library = another_process(*ways)
    algorithms.forget()
    called(given, 1)
    assert len(library.launched) > 1
