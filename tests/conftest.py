"""What every test runs under: kernels without a GPU, memory that shows if it was not written, and
caches that live as long as the run."""

import os
import tempfile

import pytest
import torch

# triton reads this when it is imported, so before anything here imports it
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # the workers of one run share its folder and its cores
        torch.set_num_threads(1)
        return
    folder = tempfile.TemporaryDirectory(prefix="kernelwright-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["KERNELWRIGHT_CACHE"] = os.path.join(folder.name, "kernelwright")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder.name, "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder.name, "inductor")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that torch.empty and its kin hand out is full of NaN: an output element that a kernel
    leaves unwritten cannot pass for a right one."""
    before = torch.are_deterministic_algorithms_enabled()
    # PyTorch fills new memory in this mode only; warn_only keeps it from refusing anything
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def rounding_interpreter(monkeypatch: pytest.MonkeyPatch):
    """Triton's interpreter cuts float32 down to bfloat16 where a GPU rounds to nearest: round, so
    that kernels are held to the bar by what they do on a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, mode)
        rounded = torch.from_numpy(data.copy()).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
