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
