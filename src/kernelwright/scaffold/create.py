"""Writes a new op from templates: a folder under `ops/`, or a package of its own."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from ..errors import CannotRun
from .names import check_name

PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).with_name("templates")
# the files of a kernel in each language
LANGUAGES = {"triton": ("triton.py",), "cuda": ("cuda.py", "cuda.cuh")}
KINDS = ("elementwise", "row-reduction", "gated", "gated-row-reduction")
COMMON = ("__init__.py", "reference.py", "cases.py")
# kinds that have a template of kernels for their gradients
WITH_BACKWARD = ("elementwise", "gated")


@dataclass(frozen=True)
class Created:
    """A new op; `language` has a comma between two; `files` are relative to `root`."""

    name: str
    language: str
    kind: str
    root: Path
    files: tuple[str, ...]
    alone: bool

    @property
    def kernel(self) -> Path:
        """The file with the kernel's formula, that of the first language."""
        last = LANGUAGES[self.language.partition(",")[0]][-1]
        return next(self.root / f for f in self.files if Path(f).name == last)

    def as_dict(self) -> dict[str, Any]:
        files = [str(self.root / file) for file in self.files]
        return {**asdict(self), "root": str(self.root), "files": files, "kernel": str(self.kernel)}


def create(
    name: str,
    language: str,
    kind: str = "elementwise",
    out: Path | None = None,
    package: Path = PACKAGE,
    backward: bool = False,
) -> Created:
    """Write a working op: into the ops of `package`, which must be a checkout, or with `out` as a
    package of its own in that folder. `language` is "triton", "cuda" or both with a comma.
    `backward` adds a Triton kernel for the gradients."""
    if backward and "triton" not in language.split(","):
        raise CannotRun(
            "the kernels of a backward are Triton's: --language triton,cuda, or leave --backward "
            "out and autograd differentiates the reference"
        )
    if backward and kind not in WITH_BACKWARD:
        raise CannotRun(
            f"--backward has templates for {' and '.join(WITH_BACKWARD)}; of a row reduction read "
            f"ops/row/backward.py, or leave it out and autograd differentiates the reference"
        )
    files = _op_files(name, language, kind, out is not None, backward)
    if out is None:
        ops = _checkout(package)
        check_name(name, ops)
        return _write(name, language, kind, ops / name, files)
    check_name(name, None)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotRun(f"{out} exists and is not an empty folder: choose another --out")
    files = {f"src/{name}/{file}": text for file, text in files.items()}
    return _write(name, language, kind, out, {**_package_files(name, language), **files})


def _checkout(package: Path) -> Path:
    """The folder `ops` of a checkout; raises CannotRun if this is none, or is read-only."""
    ops = package / "ops"
    source = (package.parents[1] / "pyproject.toml").is_file() and package.parent.name == "src"
    if not source:
        raise CannotRun(
            f"kernelwright is installed in {package}, which is not a checkout: "
            f"use --out FOLDER for a package of your own"
        )
    if not os.access(ops, os.W_OK):
        raise CannotRun(f"{ops} cannot be written: use --out FOLDER for a package of your own")
    return ops


def _op_files(name: str, language: str, kind: str, alone: bool, backward: bool) -> dict[str, str]:
    folder = TEMPLATES / kind.replace("-", "_")
    words = _words(name, language, alone, backward)
    kernels = [file for one in language.split(",") for file in LANGUAGES[one]]
    own = ["backward.py", "backward_triton.py"] if backward else []
    filled = {file: _filled(folder / file, words) for file in (*COMMON, *kernels, *own)}
    return {file: _absolute(text) if alone else text for file, text in filled.items()}


def _package_files(name: str, language: str) -> dict[str, str]:
    folder = TEMPLATES / "package"
    words = _words(name, language, alone=True)
    return {
        "pyproject.toml": _filled(folder / "pyproject.toml", words),
        "README.md": _filled(folder / "README.md", words),
        f"tests/test_{name}.py": _filled(folder / "test.py", words),
    }


def _filled(template: Path, words: dict[str, str]) -> str:
    text = template.with_name(f"{template.name}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _words(name: str, language: str, alone: bool, backward: bool = False) -> dict[str, str]:
    """The values of the templates' placeholders."""
    title = "".join(part.capitalize() for part in name.split("_"))
    imports = (f"from {name} import {name.upper()}", "from kernelwright.checking import op_tests")
    languages = language.split(",")
    quoted = [f'"{one}"' for one in languages]
    return {
        "parts": "backward, cases, reference" if backward else "cases, reference",
        "backward": "\n    backward=backward.Gradients()," if backward else "",
        "name": name,
        "Name": title,
        "NAME": name.upper(),
        "backends": ", ".join(quoted),
        "or_backends": f" or {quoted[0]}" if len(quoted) == 1 else f", {' or '.join(quoted)}",
        "Language": " and ".join({"triton": "Triton", "cuda": "CUDA C++"}[x] for x in languages),
        "distribution": f"kernelwright-{name.replace('_', '-')}",
        "extra": "[cuda]" if "cuda" in languages else "",
        "imports": "\n".join(sorted(imports)),
        "path_import": "\nfrom pathlib import Path" if alone else "",
        "source": 'str(Path(__file__).with_name("cuda.cuh"))'
        if alone
        else f'"ops/{name}/cuda.cuh"',
    }


def _absolute(text: str) -> str:
    """The text with relative imports of `ops` made absolute, for another package."""
    text = re.sub(r"(?m)^( *)from \.\.\.backends", r"\1from kernelwright.backends", text)
    text = re.sub(r"(?m)^( *)from \.\. import", r"\1from kernelwright.ops import", text)
    text = re.sub(r"(?m)^( *)from \.\.(\w)", r"\1from kernelwright.ops.\2", text)
    return re.sub(r"(?m)^(from kernelwright.*\n)(from \. )", r"\1\n\2", text)


def _write(name: str, language: str, kind: str, root: Path, files: dict[str, str]) -> Created:
    try:
        for file, text in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotRun(f"{root} cannot be written ({error.strerror}): choose another") from None
    return Created(name, language, kind, root, tuple(files), alone="pyproject.toml" in files)
