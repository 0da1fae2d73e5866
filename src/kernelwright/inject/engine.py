"""inject, injected, inspect and restore.

All that an injection leaves on a model are instance attributes: `forward` of the modules it changes
(or the slot in which a hook keeps it), and of models of transformers the loss and what `generate`
calls. Restoring removes them; copying a model copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..library_internals import let_compile
from .fp8.whole_models import place, restore_weights
from .graphs import generation
from .identify.filters import Selection
from .identify.targets import parts_of
from .planning import NUMERICS, Injection, Options, plan
from .report.report import Report
from .runtime import forwards
from .training import causal_lm_loss

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
    keep: str | None = "cpu",
    device: torch.device | str | None = None,
) -> Report:
    """Make a model use the kernels, until `restore(target)`.

    Args:
        target: a diffusers pipeline, a model of diffusers or transformers, or any nn.Module.
        numerics: "exact" is bit-identical to eager PyTorch: every module is compared with its own
            forward before it runs fused at a shape, and stays eager if it differs. "fused" rounds
            once where eager rounds after every step; its error against a float32 run is not above
            eager's. "fp8" is "fused" with FP8 GEMMs in the blocks; its error is larger.
        graphs: replay the denoiser and the text encoders of a pipeline, or the model given, as CUDA
            graphs; while gradients are recorded, forward and backward of each of its blocks.
        only, skip: names of components ("vae"), classes ("LTXAttention") or modules
            ("transformer_blocks.0.*"); one or several.
        verify: in "fused", check every module at every new shape; otherwise one module of each
            class is checked once.
        backend: the backend for every op; "auto" chooses the fastest that can run the call.
        recipes: whether to use forwards that were written for a family of models. Other blocks run
            as generated kernels; with False all of them do.
        keep: in "fp8", where the 16-bit weights of fp8 layers are meanwhile: "cpu" moves them to
            pinned CPU memory, from where `restore` brings them back; "gpu" leaves them where they
            are; None drops them, for models that are never restored, saved or copied.
        device: move the target there, in "fp8" one layer after the other: for models that were
            loaded to the CPU, so that the GPU never holds their 16-bit weights all at once.

    Returns:
        A report of what was replaced by what, and what was left alone and why. Print it.

    >>> layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    >>> inject(layers).replaced
    1
    >>> restored = restore(layers)
    """
    options = Options(numerics, graphs, only, skip, verify, backend, recipes, keep)
    destination = None if device is None else _usable(device)
    report, injections = _planned(target, options)
    for injection in injections:
        root = injection.root()
        assert root is not None
        restore_weights(root, "inject")
        for before in _active.get(root, ()):
            before.checker.retired = True
        _uninstall(root)
        _active[root] = [injection]
        injection.install()
        if destination is not None:
            place(root, destination, injection.fp8_layers)
    return report


def _usable(device: torch.device | str) -> torch.device:
    """The device to move a model to, with its number."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as no:  # a build without CUDA asserts that it has it
        why = str(no).strip().partition("\n")[0]
        raise ValueError(
            f"inject: device {str(device)!r} cannot be used ({why}); `kernelwright doctor` says "
            "what is missing"
        ) from None


def restore(target: Any) -> int:
    """Undo `inject`: bring back exactly the forwards that were there before.

    Args:
        target: what was injected, or a part of it.

    Returns:
        How many modules got their own forward back.
    """
    count = 0
    parts = parts_of(target)
    for part in parts:
        restore_weights(part.model, "restore")
    for part in parts:
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
    keep: str | None = "cpu",
) -> Iterator[Report]:
    """`inject` for the duration of a `with` block, with the same arguments.

    An earlier injection of the same model comes back after the block.
    """
    options = Options(numerics, graphs, only, skip, verify, backend, recipes, keep)
    if keep is None:
        raise ValueError("injected: keep is None, but the weights are needed after the block")
    report, injections = _planned(target, options)
    for injection in injections:
        root = injection.root()
        assert root is not None
        restore_weights(root, "injected")
        _active.setdefault(root, []).append(injection)
        _install_last(root)
    try:
        yield report
    finally:
        for injection in injections:
            root = injection.root()
            if root is not None and injection in _active.get(root, ()):
                restore_weights(root, "injected")
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
    """Show what `inject` would do, without doing it.

    It runs nothing and reads no weights, so a model on the meta device will do.

    Args:
        target: as for `inject`; so are the other arguments.

    Returns:
        The report that `inject` would return before the model has run.
    """
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
        generation.undo(module)
        causal_lm_loss.undo(module)
    return sum(forwards.remove(module) for module in root.modules())


def _install_last(root: nn.Module) -> None:
    _uninstall(root)
    if stack := _active.get(root):
        stack[-1].install()
    else:
        _active.pop(root, None)
