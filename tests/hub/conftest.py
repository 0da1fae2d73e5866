"""One build of the Hub package for all tests here: two of the same content share their name."""

from pathlib import Path

import pytest

from kernelwright import hub


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    hub.build(folder)
    return folder


@pytest.fixture(scope="session")
def kernel(package: Path):
    from kernels import get_local_kernel

    return get_local_kernel(package)


@pytest.fixture(scope="session")
def replaced():
    """The classes of a model whose modules have a forward from the package."""
    return lambda model: {
        type(m).__name__
        for m in model.modules()
        if "forward" in vars(m) and m.forward.__func__ is not type(m).forward
    }
