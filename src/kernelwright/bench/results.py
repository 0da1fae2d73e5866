"""Result files: one JSON schema, with the environment that every figure needs to be believed."""

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

SCHEMA = 1


def environment() -> dict[str, Any]:
    """GPU, driver, versions, commit and command of this run."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda_core": _version("cuda-core"),
        "python": sys.version.split()[0],
        "commit": os.environ.get("KERNELWRIGHT_COMMIT") or _commit(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *map(portable, sys.orig_argv[1:])]),
    }


def write(path: Path, kind: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Keep `rows` of one kind ("ops", "exact", ...) with this environment."""
    head = {"schema": SCHEMA, "kind": kind, "environment": environment(), **more}
    # one line a row: thousands of them stay readable, and a diff shows which changed
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps(head, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise a BadSetting, before any work, if a file could not be written there afterwards."""
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
    """The commit of this source, not of a repository that it is only used in."""
    git = ("git", "-C", str(Path(__file__).parent))
    if _output(*git, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _output(*git, "rev-parse", "HEAD")


def portable(argument: str) -> str:
    """An argument without the folders of this machine."""
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
