"""Recordings of blocks that test after test injects, each made once in a process.

A recording is found again by all that it is made of: classes with their code, attributes, layouts
of weights, inputs and gradients, and PyTorch's switches. What has another key, or anything that is
not in a key, is recorded as always; so is everything while `active` is False.
"""

import copy
import dataclasses

import torch
from everything import EVERYTHING

from kernelwright.fuser import recording
from kernelwright.fuser.recorded_ops import sdp_backends
from kernelwright.inject.identify.structure import layout, structure_of
from kernelwright.inject.state.class_code import code_of
from kernelwright.inject.state.hooks import has_settings
from kernelwright.inject.state.switches import switches
from kernelwright.inject.training import blocks, trial

PLAIN = (type(None), bool, int, float, str)
HOOKS = [
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]
MOST = 256

active = not EVERYTHING  # a test sets it to False if its blocks have to be recorded anew
_kept = {}


def kept_in(patch):
    """Put functions that remember in the place of those that record."""
    patch.setattr(blocks, "record_joint", _joint(blocks.record_joint))
    patch.setattr(trial, "rehearse_forward", _rehearsed(trial.rehearse_forward))
    patch.setattr(recording, "record", _recorded(recording.record))


def _joint(usual):
    def record_joint(module, call, tensors, gradients):
        key = _key("joint", module, (call.leaves, call.structure), [*tensors, *gradients])
        key = key and (*key, tuple(call.wanted), tuple(call.positions))
        return _once(key, lambda: usual(module, call, tensors, gradients))

    return record_joint


def _rehearsed(usual):
    def rehearse_forward(module, call, tensors):
        key = _key("rehearsal", module, (call.leaves, call.structure), tensors)
        key = key and (*key, tuple(call.positions))
        if key not in _kept:
            usual(module, call, tensors)
            _keep(key, None)

    return rehearse_forward


def _recorded(usual):
    def record(module, args, kwargs, opaque=(), *, real=True):
        def anew():
            return usual(module, args, kwargs, opaque, real=real)

        if opaque or not real:
            return anew()
        leaves, structure = recording.pytree.tree_flatten((args, kwargs))
        tensors = [*recording.weights_of(module).values()]
        tensors += [x for x in leaves if isinstance(x, torch.Tensor)]
        others = [type(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        return _once(_key("forward", module, (others, structure), tensors), anew)

    return record


def _once(key, make):
    """What was made for a key, with a graph of its own, which its user may change."""
    if key is None or key not in _kept:
        made = make()
        if not made.constants and not getattr(made, "parallel", None):
            _keep(key, _copied(made))
        return made
    return _copied(_kept[key])


def _copied(made):
    changed = {"graph": copy.deepcopy(made.graph)}
    if isinstance(made, recording.Recording):
        # of the run that was recorded; a user who needs them has opaque layers
        changed["results"] = [None] * made.returns.num_leaves
    return dataclasses.replace(made, **changed)


def _keep(key, made):
    if key is None:
        return
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[key] = made


def _key(what, module, call, tensors):
    """None if something is not to be told apart from others by its key."""
    others, structure = call
    modules = list(module.modules())
    settled = all(isinstance(x, (*PLAIN, type)) for x in others)
    hooked = any(HOOKS) or any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    if not active or not settled or hooked:
        return None
    parts = [v for m in modules for v in vars(m).values() if has_settings(v)]
    codes = tuple(code_of(type(part)) for part in (*modules, *parts))
    given = tuple(None if t is None else (layout(t), t.data_ptr() & 15) for t in tensors)
    state = switches("cpu"), torch.are_deterministic_algorithms_enabled(), tuple(sdp_backends())
    values = tuple((type(x), repr(x)) for x in others)
    return what, structure_of(module), codes, given, state, values, str(structure)
