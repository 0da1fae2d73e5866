"""Fixtures of every test: kernels without a GPU, uninitialised memory filled with NaN, and caches
that last for one run."""

import gc
import os
import platform
import sys
import tempfile
from functools import partial

import pytest
import torch
from time_savers import (  # noqa: F401
    commands_made_once,
    guards_without_a_stopwatch,
    half_products_in_float32,
    language_patched_once,
    types_known_in_the_interpreter,
)

from kernelwright.checking import conditions

conditions.interpret_without_gpu()
if not torch.cuda.is_available():
    # a full collection walks all objects that are alive. on a GPU tests look at its memory, which
    # garbage must not hold
    gc.set_threshold(20_000, 20, 100)
    # PyTorch divides a product by its threads, so one of packed weights may have other bits with
    # two; and the workers of one run share the cores
    torch.set_num_threads(1)
    # on Arm oneDNN takes five times as long as BLAS for products of this size
    torch.backends.mkldnn.enabled = platform.machine() != "aarch64"
    # torch.manual_seed also seeds devices that may come later: it notes the stack for each of them,
    # which takes a millisecond inside of a test
    for accelerator in (torch.cuda, torch.xpu, torch.mtia):
        accelerator.manual_seed_all = lambda seed: None


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the workers of one run share its folder
    folder = tempfile.TemporaryDirectory(prefix="kernelwright-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["KERNELWRIGHT_CACHE"] = os.path.join(folder.name, "kernelwright")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder.name, "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder.name, "inductor")
    # Inductor compiles and loads a program for each set of vector instructions that the CPU says it
    # has, to see that g++ knows them: 9 s in each worker
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    if not torch.cuda.is_available():
        # and it starts processes to compile in, each of which imports PyTorch: 10 s in each worker
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


_frozen = 0


def pytest_runtest_setup() -> None:
    """Benchmarks collect garbage before each configuration, and every time walk all that PyTorch
    and diffusers define, for 0.3 s: take that out of collections once it is there."""
    global _frozen
    if len(sys.modules) != _frozen and not torch.cuda.is_available():
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what Triton binds complains at exit about objects that were not collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect backends that an op does not declare; the slow ones first, so that no worker waits
    for another at the end."""
    items[:] = [item for item in items if _declared(getattr(item, "callspec", None))]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _declared(callspec: object) -> bool:
    given = getattr(callspec, "params", {})
    backend = given.get("backend")
    has = getattr(given.get("op"), "backends", None)
    return has is None or backend not in ("triton", "cuda") or backend in has


@pytest.fixture(autouse=True)
def poisoned_memory():
    with conditions.poisoned_memory():
        yield


@pytest.fixture
def rounding_interpreter():
    with conditions.rounding_interpreter():
        yield


@pytest.fixture
def written(tmp_path):
    """Writes result files into a folder of the test."""
    from result_files import write_results

    return partial(write_results, tmp_path)
