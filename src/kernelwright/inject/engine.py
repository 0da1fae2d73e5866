"""inject, injected, inspect and restore.

All that an injection leaves on a model is the instance attribute `forward` of the modules it
changes (or the slot in which a hook keeps it). Restoring removes it; copying a model copies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..library_internals import let_compile
from .identify.filters import Selection
from .identify.targets import parts_of
from .planning import NUMERICS, Injection, Options, plan
from .report.report import Report
from .runtime import forwards

__all__ = ["NUMERICS", "inject", "injected", "inspect", "restore"]

_active: WeakKeyDictionary[nn.Module, list[Injection]] = WeakKeyDictionary()


def inject(
    target: Any,
    *,
    numerics: str = "exact",
    graphs: bool = False,
    only: Any = None,
    skip: Any = None,
    verify: bool = False,
    backend: str = "auto",
    recipes: bool = True,
) -> Report:
    """Make a model use the kernels, until `restore(target)`.

    Args:
        target: a diffusers pipeline, a model of diffusers or transformers, or any nn.Module.
        numerics: "exact" gives the bits of eager PyTorch: every module is compared with its own
            forward the first time it sees a shape, and stays eager if it differs. "fused" rounds
            once where eager rounds after every step; its error is not above eager's.
        graphs: replay the forward of the denoiser and of text encoders, or of the model given, as
            CUDA graphs.
        only, skip: names of components ("vae"), of classes ("LTXAttention") or of modules
            ("transformer_blocks.0.*"), one or several.
        verify: in "fused", check every module at every new shape, not one of each class once.
        backend: "auto", or the name of the backend that every op uses.
        recipes: whether forwards written for a family of models are used. Blocks without one run as
            generated kernels; with False all of them do.

    Returns:
        A report of what was replaced, by what, and what was left alone and why. Print it.
    """
    options = Options(numerics, graphs, only, skip, verify, backend, recipes)
    report, injections = _planned(target, options)
    for injection in injections:
        root = injection.root()
        assert root is not None
        for before in _active.get(root, ()):
            before.checker.retired = True
        _uninstall(root)
        _active[root] = [injection]
        injection.install()
    return report


def restore(target: Any) -> int:
    """Restore exactly what was there before `inject`; returns how many modules changed."""
    count = 0
    for part in parts_of(target):
        for injection in _active.pop(part.model, ()):
            injection.checker.retired = True
        count += _uninstall(part.model)
    return count


@contextmanager
def injected(
    target: Any,
    *,
    numerics: str = "exact",
    graphs: bool = False,
    only: Any = None,
    skip: Any = None,
    verify: bool = False,
    backend: str = "auto",
    recipes: bool = True,
) -> Iterator[Report]:
    """`inject` for the duration of a `with` block; an earlier injection comes back after it."""
    options = Options(numerics, graphs, only, skip, verify, backend, recipes)
    report, injections = _planned(target, options)
    for injection in injections:
        root = injection.root()
        assert root is not None
        _active.setdefault(root, []).append(injection)
        _install_last(root)
    try:
        yield report
    finally:
        for injection in injections:
            root = injection.root()
            if root is not None and injection in _active.get(root, ()):
                _active[root].remove(injection)
                injection.checker.retired = True
                _install_last(root)


def inspect(
    target: Any,
    *,
    numerics: str = "exact",
    only: Any = None,
    skip: Any = None,
    recipes: bool = True,
) -> Report:
    """What `inject` would do, without doing it. Works on a model on the meta device, too."""
    report, _ = _planned(target, Options(numerics, only=only, skip=skip, recipes=recipes))
    return report.as_plan()


def _planned(target: Any, options: Options) -> tuple[Report, list[Injection]]:
    parts = parts_of(target)
    selection = Selection(options.only, options.skip, parts)
    report = Report(type(target).__name__, options.numerics)
    return report, [plan(part, selection, report, options) for part in parts]


def _uninstall(root: nn.Module) -> int:
    for module in root.modules():
        let_compile(module)
    return sum(forwards.remove(module) for module in root.modules())


def _install_last(root: nn.Module) -> None:
    _uninstall(root)
    if stack := _active.get(root):
        stack[-1].install()
    else:
        _active.pop(root, None)
