"""The examples in the docstrings run as written, and every public op has one."""

import doctest

import pytest
import torch
from declared import ALL, every_op

import kernelwright

# what an example may use without saying where it comes from
GIVEN = {
    "torch": torch,
    "nn": torch.nn,
    **{n: getattr(kernelwright, n) for n in kernelwright.__all__},
}


@every_op(ALL)
def test_a_docstring_opens_with_what_it_computes_and_its_example_runs(op):
    function = getattr(kernelwright, op.name)
    assert function.__doc__
    run(function)


@pytest.mark.parametrize("name", ["use_backend", "inject"])
def test_the_examples_of_what_goes_with_them_run(name):
    run(getattr(kernelwright, name))


def run(function):
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs=dict(GIVEN))
    assert test.examples, f"{function.__name__} has no example"
    torch.manual_seed(0)
    results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples"
