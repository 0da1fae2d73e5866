"""The loss of transformers' language models, read from 16-bit logits.

`model.loss_function` is an attribute that transformers lets its users set. As long as it is
transformers' own loss of a causal language model, an injection sets it to this one, which does the
same with other kernels; `restore` takes it away again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...backends.torch_internals import dispatch_modes, needs_torch_ops
from ...library_internals import OWN_LOSS, own_causal_lm_loss
from ..graphs.capture import capturing
from ..graphs.host_reads import reading
from ..runtime.sites import mode
from ..verify.findings import EAGER
from ..verify.first_sight import Checker
from . import cross_entropy

NAME = "ForCausalLMLoss"
# rows that are compared with eager, whose copies of all would take as much memory as it needs
COMPARED = 256


def install(model: nn.Module, checker: Checker) -> None:
    """Set the loss of the language models in a model."""
    for module in model.modules():
        own = own_causal_lm_loss(module)
        if own is not None:
            module.__dict__[OWN_LOSS] = CausalLMLoss(own, checker)


def undo(module: nn.Module) -> None:
    """Undo `install`."""
    if isinstance(module.__dict__.get(OWN_LOSS), CausalLMLoss):
        del module.__dict__[OWN_LOSS]


class CausalLMLoss:
    """transformers' loss, with the arguments of `own`."""

    def __init__(self, own: Callable[..., Tensor], checker: Checker) -> None:
        self._own, self._checker = own, checker
        self._verdicts: dict[Any, str | None] = {}  # why eager is needed, or None

    def __deepcopy__(self, memo: Any) -> CausalLMLoss:
        return self  # copies of a model share their forwards, too

    def __reduce__(self) -> Any:
        return _pickled, (self._own,)  # whoever loads a model has it without an injection

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        target = labels if shift_labels is None else shift_labels
        if self._why_not(logits, target, vocab_size) is not None:
            given = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
            return self._own(*given, **kwargs)
        assert target is not None
        if shift_labels is None:  # a token is predicted by those before it
            target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
        target = target.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        rows = logits.view(-1, vocab_size)
        loss = cross_entropy.cross_entropy(rows, target, ignore_index, reduction)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _why_not(self, logits: Tensor, target: Tensor | None, classes: int) -> str | None:
        """Why a call runs transformers' own loss, or None."""
        if (
            torch.compiler.is_compiling()
            or self._checker.retired
            or mode.eager
            or needs_torch_ops()
            or dispatch_modes()
        ):
            return f"{EAGER}: something sees every operation"
        if type(logits) is not Tensor or type(target) is not Tensor or target.dtype != torch.int64:
            return f"{EAGER}: logits or labels of another class or dtype"
        if not logits.is_contiguous() or logits.shape[-1] != classes:
            return f"{EAGER}: logits of another layout"
        rows = logits.detach().view(-1, classes)
        if target.numel() != len(rows):
            return f"{EAGER}: another number of labels than logits"
        why = cross_entropy.why_not(rows)
        if why is not None:
            self._note(f"{EAGER}: {why}")
            return why
        key = logits.device, logits.dtype, classes
        if key not in self._verdicts:
            if capturing() or reading():
                return f"{EAGER}: not compared yet"  # a comparison is no part of a graph
            self._verdicts[key] = why = _compared(rows[:COMPARED])
            text = "cross-entropy from 16-bit logits in 2 kernels"
            self._note(text if why is None else f"{EAGER}: {why}")
        elif capturing() or reading():
            return f"{EAGER}: its kernel may not be built yet"
        return self._verdicts[key]

    def _note(self, text: str) -> None:
        self._checker.gradients[NAME, text] = 1


def _pickled(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return own


def _compared(rows: Tensor) -> str | None:
    """Why cross-entropy of such logits runs eager, or None."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _difference(rows)
    except torch.OutOfMemoryError:
        return "not enough memory to compare"


def _difference(rows: Tensor) -> str | None:
    """How cross-entropy of these logits and its gradient differ from eager's, or None."""
    count, classes = rows.shape
    target = torch.arange(count, device=rows.device) * 7919 % classes
    target[1::5] = -100
    for reduction in ("mean", "sum"):
        found = []
        for function in (cross_entropy.cross_entropy, cross_entropy.eager):
            leaf = rows.clone().requires_grad_()
            loss = function(leaf, target, -100, reduction)
            (gradient,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.37))
            found.append((loss.detach(), gradient))
        (ours, d_ours), (theirs, d_theirs) = found
        if not torch.equal(ours, theirs):
            return "the loss has other bits than eager's"
        if not torch.equal(d_ours, d_theirs):
            return "the gradient of the logits has other bits than eager's"
    return None
