"""A cuBLASLt on the CPU, for the tests that choose between its algorithms."""

import pytest
import torch
from cublaslt_on_cpu import CublasLt

from kernelwright.backends.cache import KernelCache
from kernelwright.ops.linear import algorithms, choosing, cublaslt, kept_choices


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Puts a library that knows these algorithms, and a GPU, in place of the real ones."""
    kept = KernelCache(tmp_path / "kept")
    monkeypatch.setattr(kept_choices, "cache", lambda: kept)

    def put(*known, **facts):
        library = CublasLt(list(known), **facts)
        algorithms.forget()
        choosing._library.cache_clear()
        monkeypatch.setattr(choosing, "load", lambda: library)
        monkeypatch.setattr(choosing, "capability", lambda device: library.capability)
        monkeypatch.setattr(choosing, "gpu", lambda device: "a GPU")
        monkeypatch.setattr(choosing, "readings", library.readings)
        monkeypatch.setattr(choosing, "_stream", lambda device: 0)
        for module in (choosing, cublaslt):
            monkeypatch.setattr(module, "ALIGNMENT", 64)  # of PyTorch's allocations on the CPU
        monkeypatch.setattr(algorithms, "LEAST_FLOP", 1)
        monkeypatch.setattr(algorithms, "serves", lambda device: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return library

    yield put
    algorithms.forget()
    choosing._library.cache_clear()
