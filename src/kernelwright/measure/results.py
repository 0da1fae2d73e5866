"""Result files: one JSON schema, with the environment that the figures were measured in."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import BadSetting
from ..ops.ways import replacing_packages
from . import turns

SCHEMA = 1
CONDITIONS = "in turns with other measurements: while one took times, the others were stopped"


def environment() -> dict[str, Any]:
    """GPU, driver, versions, commit and command of this run. `packages` are those with which
    PyTorch replaces kernels of its own."""
    gpu = torch.cuda.is_available()
    beside = {"conditions": CONDITIONS} if turns.taken() else {}
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda_core": _version("cuda-core"),
        "packages": [f"{name} {found}" for name, found in replacing_packages()],
        "python": sys.version.split()[0],
        "commit": os.environ.get("KERNELWRIGHT_COMMIT") or _commit(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *map(portable, sys.orig_argv[1:])]),
        **beside,
    }


def environment_of(device: torch.device) -> dict[str, Any]:
    """The environment of a run on `device`; names no GPU for a run on the CPU."""
    found = environment()
    return found if device.type == "cuda" else {**found, "gpu": None}


def write(path: Path, kind: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write `rows` of one kind ("ops", "exact", ...) with the environment of this run."""
    head = {"schema": SCHEMA, "kind": kind, "environment": environment(), **more}
    # one line a row, so that a diff shows which rows changed
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps(head, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise BadSetting before any work if this file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{path} cannot be written ({reason}): choose another file"
        raise BadSetting(option, message) from None


def _commit() -> str | None:
    """The commit of this source; None if it is not tracked by the repository around it."""
    git = ("git", "-C", str(Path(__file__).parent))
    if _output(*git, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _output(*git, "rev-parse", "HEAD")


def portable(argument: str) -> str:
    """An argument without folders of this machine: an absolute path becomes its file name."""
    return Path(argument).name if os.path.isabs(argument) else argument


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
