"""Configurations that cuBLASLt does not name: tried where they are known to do no harm."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cublaslt_on_cpu import Known, decided, operands

from kernelwright.ops.linear import algorithms, configurations
from kernelwright.ops.linear.algorithms import linear


def test_a_configuration_that_is_not_named_is_asked_for_and_taken(pretend):
    mine = configurations.Configuration(tile=248, option=7, cluster=5)
    first, other, *unknown = configurations.MORE
    library = pretend(Known(100, of=mine), Known(97, of=first), Known(90, of=other, named=False))
    x, weight, bias = operands()
    for _ in range(2):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert library.launched[-1][0] == 2
    assert library.checked == [other, *unknown]  # the named one was not asked for again
    power = configurations.POWER
    assert decided().us == pytest.approx(90 * power[other] / power[mine])


@pytest.mark.parametrize(
    ("version", "capability"),
    [
        (130_101, (9, 0)),
        (130_200, (9, 0)),
        (120_901, (9, 0)),
        (140_000, (9, 0)),
        (130_100, (10, 0)),
    ],
)
def test_another_cublaslt_or_gpu_is_never_asked_for_what_it_does_not_name(
    pretend, version, capability
):
    """A later patch may number them otherwise, and nothing catches a division by zero."""
    mine, *others = (configurations.Configuration(248, 7, 5), *configurations.MORE)
    known = [Known(100, of=mine), *(Known(10, of=other, named=False) for other in others)]
    library = pretend(*known, version=version, capability=capability)
    touched = []
    setter = library.cublasLtMatmulAlgoConfigSetAttribute
    library.cublasLtMatmulAlgoConfigSetAttribute = lambda *a: touched.append(a) or setter(*a)
    for rows in (6, 100):
        linear(*operands((rows,)))
    assert not library.checked
    assert not touched
    assert {number for number, _ in library.launched} == {0}
    told = "cuBLASLt {}.{}.{} on capability {}.{} was not tried".format(
        version // 10_000, version // 100 % 100, version % 100, *capability
    )
    assert f"does not name are not tried: {told}" in algorithms.describe()
    library = pretend(*known)
    linear(*operands())
    assert library.checked == others
    assert algorithms.describe().endswith("does not name are tried")


def test_a_cublaslt_that_does_not_say_its_version_is_not_asked(pretend):
    library = pretend(Known(100, of=configurations.Configuration(tile=248, option=7, cluster=5)))
    library.cublasLtGetVersion = None
    linear(*operands())
    assert not library.checked
    assert "does not say which version" in algorithms.describe()


def test_configurations_are_those_of_hoppers_algorithm_alone(pretend):
    library = pretend(Known(100), Known(90))
    linear(*operands())
    assert not library.checked


def test_whether_they_are_tried_is_told_without_a_product(pretend):
    cpu = torch.device("cpu")
    assert "not tried: algorithms are chosen on GPUs of capability 9.0" in algorithms.unnamed(cpu)
    pretend()
    assert algorithms.unnamed(cpu).endswith("are tried")
    with algorithms.use_algorithms(False):
        assert "not tried: KERNELWRIGHT_CUBLASLT=0" in algorithms.unnamed(cpu)


def test_the_documentation_lists_what_was_tried():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    rows = [
        f"| {tried.version} | {'{}.{}'.format(*tried.capability)} | {tried.where} |"
        for tried in configurations.TRIED
    ]
    table = page.partition("| cublasLtGetVersion |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == rows
