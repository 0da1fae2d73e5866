"""Compiles the kernels of ../ltx-kernels with nvcc and torch, without kernel-builder and Nix.

    pip install --no-build-isolation ./hub/ltx-kernels-aot    for kernelwright's backend "aot"
    python setup.py build_kernel                              a Hub variant in build/

TORCH_CUDA_ARCH_LIST="9.0" builds for these GPUs only; without it, for all that the toolkit knows.
LTX_KERNELS_CASES=all adds the shapes of the tests to those of the models.
"""

import os
import sys
from pathlib import Path
from typing import ClassVar

import torch
from setuptools import Command, setup

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "ltx-kernels"
CHECKOUT = HERE.parents[1] / "src"
if CHECKOUT.is_dir():
    sys.path.insert(0, str(CHECKOUT))

from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CUDAExtension,
    is_ninja_available,
)

from kernelwright.hub import extension  # noqa: E402

if torch.version.cuda is None:
    sys.exit("this torch is built without CUDA: install the build for your CUDA toolkit first")

SOURCE = HERE / "build" / "source"
made = extension.plan(PROJECT, SOURCE, os.environ.get("LTX_KERNELS_CASES", "models"))

# a library of other kernels, left by an earlier build, must not be packed beside this one
for library in (HERE / "build").glob("lib*/ltx_kernels_aot/_ltx_kernels_aot_*"):
    if made.name not in library.name:
        library.unlink()


class BuildKernel(Command):
    """Write build/<variant>/, which kernels.get_local_kernel loads."""

    description = __doc__
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        build = self.get_finalized_command("build_ext")
        build.inplace = False
        build.run()
        (library,) = (Path(p) for p in build.get_outputs())
        print(extension.assemble(library, HERE / "build", made))


setup(
    ext_modules=[
        CUDAExtension(
            f"ltx_kernels_aot.{made.name}",
            # setuptools takes relative paths only
            [os.path.relpath(p, HERE) for p in made.sources],
            include_dirs=[str(p) for p in made.includes],
            extra_compile_args={"cxx": ["-O3"], "nvcc": list(made.nvcc_flags)},
            py_limited_api=True,
        )
    ],
    cmdclass={
        "build_ext": BuildExtension.with_options(use_ninja=is_ninja_available()),
        "build_kernel": BuildKernel,
    },
)
