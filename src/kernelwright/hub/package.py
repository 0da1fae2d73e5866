"""The Hub package: a copy of `ops` and `backends` under another name, with layers.

    DIR/build/torch-cuda/     metadata.json  __init__.py  _ops.py  layers/  ops/  backends/
    DIR/build/torch-rocm/     the same under another name, and so on

Nothing is compiled: Triton and the PyTorch reference run wherever torch does, and the CUDA C++
headers are included for machines that have NVRTC. The id in metadata.json names the module and its
torch.ops namespace. It ends in a hash of the files, so two versions of the package, or the package
and an installed kernelwright, can be loaded in one process. The digest there lists the hash of each
file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .digest import seal

NAME = "ltx-kernels"
PYTHON_NAME = NAME.replace("-", "_")
# the Hub's convention: 0 while the API may still change
VERSION = 0
LICENSE = "MIT"
KERNELWRIGHT = Path(__file__).resolve().parents[1]
# variants and the backend in their metadata; torch-universal loads everywhere
VARIANTS = {
    "torch-cuda": "cuda",
    "torch-rocm": "rocm",
    "torch-cpu": "cpu",
    "torch-universal": "cuda",
}

INIT = '''"""Fused kernels for LTX-Video and similar models: norms, modulation, RoPE, gated units.

Every function runs on tensors of any device: a fused kernel on a GPU, plain PyTorch elsewhere.
"""

from . import layers, ops
from ._ops import add_op_namespace_prefix
from ._ops import ops as _namespace
from .backends import aot
from .ops import *  # noqa: F403

if hasattr(_namespace, "launch"):
    aot.connect(_namespace)  # this variant holds compiled kernels

__all__ = ["add_op_namespace_prefix", "layers", *ops.__all__]
'''

OPS = '''"""The torch.ops namespace of this package."""

import torch

NAMESPACE = "{id}"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an op of this package."""
    return f"{{NAMESPACE}}::{{op_name}}"
'''


@dataclass(frozen=True)
class Built:
    """A variant on disk."""

    variant: str
    id: str
    path: Path
    files: int

    def as_dict(self) -> dict[str, str | int]:
        return {"variant": self.variant, "id": self.id, "path": str(self.path), "files": self.files}


def build(out: Path, variants: Sequence[str] = tuple(VARIANTS)) -> list[Built]:
    """Write the variants to `out/build`, each atomically."""
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown or not variants:
        raise ValueError(
            f"no variant {', '.join(unknown) or 'given'}; there are {', '.join(VARIANTS)}"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder")
    files = sources()
    return [write(out / "build" / v, files, VARIANTS[v], v) for v in variants]


def write(place: Path, files: Mapping[str, str], backend: str, variant: str) -> Built:
    """Write one variant; `files` are those that all variants share."""
    name = identity(files, variant.replace("torch-", "").replace("-", "_"))
    whole = {
        **files,
        "__init__.py": INIT,
        "_ops.py": OPS.format(id=name),
        "metadata.json": metadata(name, backend),
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / "whole"
        for path, text in whole.items():
            file = made / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        seal(made)
        if place.exists():
            shutil.rmtree(place)
        made.rename(place)
    return Built(variant, name, place, len(whole))


def sources() -> dict[str, str]:
    """The files of every variant by path: ops, backends and layers."""
    found: dict[str, str] = {}
    for part in ("ops", "backends"):
        for file in sorted((KERNELWRIGHT / part).rglob("*")):
            if file.suffix in (".py", ".cuh"):
                found[str(file.relative_to(KERNELWRIGHT))] = file.read_text()
    # layers are one folder deeper here than in the package
    for file in sorted((KERNELWRIGHT / "hub" / "layers").glob("*.py")):
        text = re.sub(r"^from \.\.\.", "from ..", file.read_text(), flags=re.M)
        found[f"layers/{file.name}"] = text
    return found


def identity(files: Mapping[str, str], variant: str) -> str:
    """The name of the module and of its torch.ops namespace."""
    digest = hashlib.sha256()
    for path, text in sorted(files.items()):
        digest.update(f"{path}\0{text}\0".encode())
    return f"_{PYTHON_NAME}_{variant}_{digest.hexdigest()[:7]}"


def metadata(name: str, backend: str, archs: Sequence[str] = ()) -> str:
    """metadata.json; `archs` are the compute capabilities of compiled kernels."""
    kind: dict[str, object] = {"type": backend}
    if archs:
        kind["archs"] = list(archs)
    content = {
        "name": NAME,
        "id": name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "kernel-depends": [],
        "backend": kind,
    }
    return json.dumps(content, indent=2) + "\n"
