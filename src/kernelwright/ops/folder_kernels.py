"""The kernels of an op's folder: `triton.py` and `cuda.py`, each with a function `plan(call)`, or
one of another name where a folder has several ops."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backends import Launch
    from .plan import Call


@dataclass(frozen=True)
class FolderKernels:
    """`folder` is the op's package; each file is imported when its kernel is first needed."""

    folder: str
    plan: str = "plan"

    def triton(self, call: Call) -> Launch:
        return getattr(import_module(".triton", self.folder), self.plan)(call)

    def cuda(self, call: Call) -> Launch:
        return getattr(import_module(".cuda", self.folder), self.plan)(call)
