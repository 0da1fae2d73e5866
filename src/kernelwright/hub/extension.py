"""The kernels compiled ahead of time: which instances, their source project, and their Hub variant.

`hub/ltx-kernels` holds what is written by hand and names no op; kernel-builder writes its setup.py.
`hub/ltx-kernels-aot` compiles the same without kernel-builder. The rest is generated when it is
built: the instances, which are the launches that the declared cases need, the files that compile
them, and copies of the package's `.cuh` files, so that there is one text of each kernel.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import catalog
from ..backends import HOPPER, Unsupported
from ..ops.case import Inputs
from ..ops.op import Op, registry
from ..ops.plan import Call
from ..ops.rows import with_dense_rows
from . import package
from .build_files import ARCHS, INCLUDE, REGISTRATION, build_files
from .digest import seal

if TYPE_CHECKING:
    from ..backends.cuda import CudaLaunch

CASES = ("models", "all")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# what is written by hand, from the project's folder
WRITTEN = ("build.toml", "flake.nix", "CARD.md", "torch-ext", "cuda", "benchmarks", "tests")

COMPILED_OPS = '''"""The torch.ops namespace of the compiled kernels."""

from pathlib import Path

import torch

NAMESPACE = "{id}"
ops = getattr(torch.ops, "{namespace}")
if not hasattr(ops, "launch"):  # another package may have loaded the same library
    torch.ops.load_library(str(Path(__file__).parent / "{library}"))


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an op of this package."""
    return f"{{NAMESPACE}}::{{op_name}}"
'''


@dataclass(frozen=True)
class Extension:
    """What a build needs: the library's name, which is its torch.ops namespace, and its sources."""

    name: str
    sources: tuple[Path, ...]
    includes: tuple[Path, ...]
    archs: tuple[str, ...]

    @property
    def nvcc_flags(self) -> tuple[str, ...]:
        numbers = [a.replace(".", "") for a in self.archs]
        codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
        return ("-O3", "--threads", "0", *codes)


def plan(project: Path, out: Path, cases: str = "models") -> Extension:
    """Write the source project to `out`; returns what to compile."""
    written = export(project, out, cases)
    # kernel-builder writes this file itself, and stops where there is one
    written.append(_write(out / "torch-ext" / "registration.h", REGISTRATION))
    text = {str(p.relative_to(out)): p.read_text() for p in written if p.suffix != ".md"}
    name = package.identity(text, "aot")
    # not all that is in `out`: an earlier build may have left the file of a removed op
    sources = tuple(p for p in written if p.suffix in (".cu", ".cpp"))
    return Extension(name, sources, (out / "cuda", out / INCLUDE, out / "torch-ext"), archs())


def export(project: Path, out: Path, cases: str = "models") -> list[Path]:
    """Write the source project as kernel-builder takes it: nothing outside its folder is needed."""
    if not (project / "build.toml").is_file():
        raise ValueError(f"{project} has no build.toml; name hub/ltx-kernels of a checkout")
    files: dict[str, str] = {}
    for name in WRITTEN:
        place = project / name
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and "__pycache__" not in file.parts:
                files[str(file.relative_to(project))] = file.read_text()
    sources = package.sources()
    headers = {path: text for path, text in sources.items() if path.endswith(".cuh")}
    files |= {f"{INCLUDE}/{path}": text for path, text in headers.items()}
    files |= {f"torch-ext/{package.PYTHON_NAME}/{path}": text for path, text in sources.items()}
    files[f"torch-ext/{package.PYTHON_NAME}/__init__.py"] = package.INIT
    files |= build_files(instances(cases), headers, files["build.toml"])
    files["CARD.md"] = catalog.fill_section(
        files["CARD.md"], "ops", catalog.markdown(catalog.entries())
    )
    return [_write(out / path, text) for path, text in files.items()]


def instances(cases: str = "models") -> dict[str, list[CudaLaunch]]:
    """The kernels of each family, the op folder that their source lies in: those that the large
    cases (shapes of models) launch in each dtype and exact mode; with "all", those of every case.
    """
    if cases not in CASES:
        raise ValueError(f"cases are {cases!r}, expected one of {CASES}")
    found: dict[str, dict[str, CudaLaunch]] = {}
    for op in registry().values():
        if not isinstance(op, Op) or "cuda" not in op.backends:
            continue
        for case in op.cases:
            if case.large or cases == "all":
                for dtype in DTYPES:
                    for launch in launches(op, case.arguments(Inputs(dtype, "meta"))):
                        if os.path.isabs(launch.source):
                            continue  # an op of another package, which builds its own
                        family = Path(launch.source).parent.name
                        found.setdefault(family, {}).setdefault(launch.template, launch)
    return {family: [each[t] for t in sorted(each)] for family, each in sorted(found.items())}


def launches(op: Op, arguments: Mapping[str, Any]) -> Iterator[CudaLaunch]:
    """What the cuda backend launches for these arguments, free and in each exact mode. A tensor
    with a storage offset is planned twice: as if it were aligned, and with its real alignment."""
    args = with_dense_rows(arguments[n] for n in op.arguments)
    outs = op.allocate(*args)
    if all(o.numel() == 0 for o in outs):
        return
    values = dict(zip((*op.arguments, *op.outputs), (*args, *outs), strict=True))
    bits = 16
    for t in values.values():
        if isinstance(t, Tensor):
            bits |= int(t.storage_offset()) * t.element_size() % 16
    for exact in (None, *op.exact):
        for alignment in sorted({16, bits & -bits}, reverse=True):
            call = Call(values, op=op.name, exact=exact, target=HOPPER, alignment=alignment)
            try:
                yield op.kernels.cuda(call)  # type: ignore[misc]
            except Unsupported:
                continue


def archs() -> tuple[str, ...]:
    """Compute capabilities to build for: TORCH_CUDA_ARCH_LIST, or all of ARCHS that nvcc knows."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if asked:
        return tuple(re.findall(r"\d+\.\d", asked))
    nvcc = compiler()
    if nvcc is None:
        raise ValueError("nvcc was not found: install the CUDA toolkit, or set CUDA_HOME")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    known = listed.stdout.split()
    return tuple(a for a in ARCHS if f"sm_{a.replace('.', '')}" in known)


def compiler() -> str | None:
    """nvcc of CUDA_HOME, of the PATH, or of /usr/local/cuda."""
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    named = [str(Path(p) / "bin" / "nvcc") for p in places if p]
    return next((p for p in (named[0], shutil.which("nvcc"), *named) if p and _runs(p)), None)


def assemble(library: Path, out: Path, made: Extension) -> Path:
    """Write the Hub variant of a built library: the files of `package.build`, and the library."""
    torch_version = "".join(torch.__version__.split(".")[:2])
    cuda = (torch.version.cuda or "").replace(".", "")
    system = platform.system().lower()
    variant = f"torch{torch_version}-cxx11-cu{cuda}-{platform.machine()}-{system}"
    files = package.sources()
    name = package.identity(files, f"torch{torch_version}_cu{cuda}")
    place = out / variant
    package.write(place, files, "cuda", variant)
    shutil.copy2(library, place / library.name)
    operators = COMPILED_OPS.format(id=name, library=library.name, namespace=made.name)
    (place / "_ops.py").write_text(operators)
    (place / "metadata.json").write_text(package.metadata(name, "cuda", made.archs))
    seal(place)
    return place


def _runs(path: str) -> bool:
    return os.access(path, os.X_OK)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # an unchanged file keeps its modification time, so a build compiles only what changed
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path
