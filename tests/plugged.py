"""Packages of `kernelwright new`, as pip installs them: on the path, with an entry point."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelwright.ops import declared_ops, plugins
from kernelwright.scaffold import Created


def paths(created: Created) -> list[str]:
    """The folders that must be on the path for the package to count as installed."""
    text = (created.root / "pyproject.toml").read_text()
    entries = text.partition(f'[project.entry-points."{plugins.GROUP}"]\n')[2].partition("\n\n")[0]
    site = created.root / "site"
    info = site / f"{created.name}-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Name: {created.name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{entries.replace(chr(34), '')}\n")
    return [str(created.root / "src"), str(site)]


def environment(*folders: str | Path) -> dict[str, str]:
    """The environment of this process, with these folders first on PYTHONPATH."""
    known = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), known]).rstrip(":")}


@contextmanager
def plugged(*packages: Created) -> Iterator[None]:
    """Register the ops of these packages in this process, and remove them afterwards."""
    path, known = list(sys.path), dict(declared_ops.declared)
    sys.path[:0] = [p for created in packages for p in paths(created)]
    plugins.load.cache_clear()
    try:
        yield
    finally:
        sys.path[:] = path
        declared_ops.declared.clear()
        declared_ops.declared.update(known)
        for name in [n for n in sys.modules if n.partition(".")[0] in {c.name for c in packages}]:
            del sys.modules[name]
        plugins.load.cache_clear()


def change(path: Path, old: str, new: str) -> None:
    """Replace text that must be present."""
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))
