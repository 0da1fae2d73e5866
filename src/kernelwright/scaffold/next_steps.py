"""What `kernelwright new` prints: the files, and the commands that come next."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from .create import Created

HOLDS = {
    "__init__.py": "the function, its checks and declaration",
    "reference.py": "the formula in plain PyTorch: change it first",
    "cases.py": "the shapes of tests and benchmarks",
    "backward.py": "its gradients: the formula, and what is kept for it",
    "backward_triton.py": "the kernel of the gradients, and how it is launched",
    "triton.py": "the kernel, and how it is launched",
    "cuda.py": "how the kernel is launched",
    "cuda.cuh": "the kernel",
    "pyproject.toml": "the package and its entry point",
}


def page(created: Created) -> RenderableType:
    """The tree and the next three commands."""
    tree = Tree(Text(f"{shown(created.root)}/", style="bold"))
    folders: dict[Path, Tree] = {Path(): tree}
    for file in created.files:
        path = Path(file)
        for folder in reversed(path.parents):
            if folder not in folders:
                folders[folder] = folders[folder.parent].add(Text(f"{folder.name}/", style="bold"))
        label = Text(f"{path.name:<19}").append(HOLDS.get(path.name, ""), style="dim")
        folders[path.parent].add(label)
    return Group(tree, Text("\nnext:"), *(Text(f"  {c}") for c in commands(created)))


def commands(created: Created) -> tuple[str, str, str]:
    """The commands to run next."""
    check = f"kernelwright check {created.name}"
    if created.alone:
        root = shown(created.root)
        return f"pip install -e {root}", check, f"pytest {root}/tests"
    return check, f"kernelwright bench ops {created.name}", "make docs"


def shown(path: Path) -> str:
    """A path relative to the current folder, if it is below it."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
