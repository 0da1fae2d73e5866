"""What a model calls. Every folder here declares its ops; this file imports the folders."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from .op import registry, use_backend

__all__ = ["registry", "use_backend"]

for _found in pkgutil.iter_modules(__path__):
    if _found.ispkg:
        _folder: Any = importlib.import_module(f".{_found.name}", __name__)
        for _name in getattr(_folder, "__all__", ()):
            globals()[_name] = getattr(_folder, _name)
            __all__.append(_name)
__all__.sort()
