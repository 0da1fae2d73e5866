"""The kernels of an op's folder: `triton.py` and `cuda.py`, each with a function `plan(call)`."""

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

    def triton(self, call: Call) -> Launch:
        return import_module(".triton", self.folder).plan(call)

    def cuda(self, call: Call) -> Launch:
        return import_module(".cuda", self.folder).plan(call)
