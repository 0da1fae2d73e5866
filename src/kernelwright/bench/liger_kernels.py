"""A language model with Liger's kernels, as a peer to compare with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ..errors import CannotRun


@contextmanager
def liger(model: Any) -> Iterator[None]:
    """The model with Liger's kernels, as its own function for this kind of model sets them. It
    also changes functions and classes of the model's file, which are put back, as the modules
    are."""
    if find_spec("liger_kernel") is None:
        raise CannotRun("Liger is not installed: pip install 'kernelwright[bench]'")
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise CannotRun(f"Liger needs a CUDA GPU, the model is on {device}")
    kind = getattr(model.config, "model_type", type(model).__name__)
    known = importlib.import_module("liger_kernel.transformers")
    apply = getattr(known, f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise CannotRun(f"Liger has no kernels for {kind}")
    file = sys.modules[type(model).__module__]
    names = dict(vars(file))
    classes: list[Any] = [
        c for c in names.values() if isinstance(c, type) and c.__module__ == file.__name__
    ]
    forwards = [(c, c.__dict__["forward"]) for c in classes if "forward" in c.__dict__]
    called = [(c, c.__name__) for c in classes]
    modules = [(m, dict(vars(m))) for m in model.modules()]
    try:
        apply(model=model)
        yield
    finally:
        vars(file).update(names)
        for owner, forward in forwards:
            owner.forward = forward
        for owner, name in called:
            owner.__name__ = name
        for module, attributes in modules:
            vars(module).clear()
            vars(module).update(attributes)
