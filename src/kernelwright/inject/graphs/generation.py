"""Lets `generate` launch the next token before it knows whether the last one was the end.

After every token transformers reads on the host whether all sequences have ended, and the GPU is
idle from there until the next token is launched: 2.4 of 7.9 ms of a token of Llama-3-8B on an H200.
Its DeferredStopCheck (transformers 5.22) reads that one token late and drops the token too many,
but it is off on CUDA. Here it is on while a model generates that is replayed as graphs; the tokens
are the same, and so is the state of the random numbers afterwards.

What the user adds to `generate` may count its calls, so the check is deferred only where all logits
processors and stopping criteria are transformers' own, and the cache is not returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...library_internals import DEFERRED_STOP_CHECK, generation_module

DEVICES = ("cuda",)
# of transformers.generation: their calls depend on nothing but tokens and logits
PLAIN = {
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper"),
    *("RepetitionPenaltyLogitsProcessor", "TopPLogitsWarper", "TopKLogitsWarper"),
    *("TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper"),
    *("EtaLogitsWarper", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "LogitNormalization"),
    *("ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"),
    *("ExponentialDecayLengthPenalty", "SuppressTokensLogitsProcessor"),
    *("SuppressTokensAtBeginLogitsProcessor", "MaxLengthCriteria", "MaxTimeCriteria"),
    *("EosTokenCriteria", "StopStringCriteria"),
}
PROCESSORS, CRITERIA = "_get_logits_processor", "_get_stopping_criteria"


class _Noted(threading.local):
    """What `generate` of an injected model has prepared in this thread."""

    cache: Any = None
    plain = False


_noted = _Noted()


def defer_stop_checks(model: nn.Module) -> None:
    """Let `generate` of this model run ahead of the GPU by a token."""
    module = generation_module()
    kind = getattr(module, DEFERRED_STOP_CHECK, None)
    notes: dict[str, Callable[..., None]] = {PROCESSORS: _note_processors, CRITERIA: _note_criteria}
    if kind is None or not all(hasattr(type(model), name) for name in notes):
        return
    if not hasattr(kind, "usual"):  # for other models it does what it did
        setattr(module, DEFERRED_STOP_CHECK, _with_graphs(kind))
    for name, note in notes.items():
        model.__dict__[name] = MethodType(_noting(getattr(type(model), name), note), model)


def undo(model: nn.Module) -> None:
    """Undo `defer_stop_checks`."""
    for name in (PROCESSORS, CRITERIA):
        if hasattr(model.__dict__.get(name), "is_kernelwrights"):
            del model.__dict__[name]


def _noting(function: Any, note: Callable[..., None]) -> Any:
    @wraps(function)
    def prepared(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = function(self, *args, **kwargs)
        note(found, **kwargs)
        return found

    prepared.is_kernelwrights = True  # type: ignore[attr-defined]
    return prepared


def _note_processors(processors: Any, model_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
    _noted.cache = (model_kwargs or {}).get("past_key_values")
    _noted.plain = _are_plain(processors)


def _note_criteria(criteria: Any, **_: Any) -> None:
    _noted.plain = _noted.plain and _are_plain(criteria)


def _are_plain(found: Iterable[Any]) -> bool:
    kinds = [type(f) for f in found]
    return all(k.__name__ in PLAIN and k.__module__.startswith("transformers.") for k in kinds)


def _with_graphs(kind: Any) -> Any:
    """transformers' DeferredStopCheck, that takes part in generating with graphs as well."""

    class StopCheck(kind):
        usual = kind

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
        ) -> bool:
            ours = cache is not None and _noted.cache is cache and _noted.plain
            _noted.cache = None
            if not ours or device.type not in DEVICES:
                return kind.is_supported(device, cache, cache_is_returned, is_assistant)
            return not (cache_is_returned or is_assistant)

        def __init__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            place = input_ids.get_device()  # -1 on a CPU
            self._random = torch.cuda.default_generators[place] if place >= 0 else None
            self._drawn: list[int] = []

        def __call__(self, *args: Any, **kwargs: Any) -> bool:
            if self._random is not None:
                self._drawn = [*self._drawn[-1:], self._random.get_offset()]
            return super().__call__(*args, **kwargs)

        def finish(self) -> int:
            undone = super().finish()
            if undone and self._random is not None:
                self._random.set_offset(self._drawn[0])
            return undone

    return StopCheck
