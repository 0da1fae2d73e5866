"""Draws changes, applies them to both sides, and compares the sides after each."""

import copy
import gc
import os
from collections import Counter
from pathlib import Path

import torch

import kernelwright as kw
from kernelwright.inject.verify import accuracy

from .core import (
    KINDS,
    Differs,
    NotHere,
    Refused,
    Side,
    World,
    call,
    difference,
    drawn,
    outputs,
    same_bits,
)

# of a sum of float32 in another order, over the few thousand terms of a tiny model
GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}
HALF_GRADIENTS = {"rtol": 2**-6, "atol": 2**-10}

# what each tier may be off by: eager's own error in the bfloat16 of a tiny model (8 bits of
# mantissa, some four roundings in a row), the error of an fp8 layer, and float32's
ERRORS = {"fused": 2**-6, "fp8": 0.074}
FLOAT32_ERROR = 1e-5
AMPLIFIED = 1.25

UNDO = "undo"
# a file for the step under way: a process that crashes in it leaves that behind
UNDER_WAY = os.environ.get("KERNELWRIGHT_FUZZ_REPLAY")


class Tally:
    """What was drawn, what eager refused, and what differed."""

    def __init__(self):
        self.steps, self.kinds, self.refused, self.differences = 0, Counter(), Counter(), []

    def __str__(self):
        drawn_kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        return (
            f"{self.steps} steps of {len(self.kinds)} of {len(KINDS) + 1} kinds, "
            f"{len(self.differences)} differences, {self.refused.total()} refused by eager: "
            f"{drawn_kinds}"
        )


def names_for(world):
    return [n for n, k in KINDS.items() if world.numerics == "exact" or not k.exact_only] + [UNDO]


def change(world, name, number):
    """Make a change on both sides. `NotHere` if there is nothing to change, `Refused` if a model
    that is not injected does not take it."""
    if name == UNDO:
        return undo(world, drawn(number))
    kind = KINDS[name]
    if not kind.of_models:
        try:
            undone = kind.change(world, drawn(number))
        except (NotHere, Differs, Refused):
            raise
        except Exception as error:
            raise Refused(repr(error)) from error
        if undone is not None:
            world.process.append(undone)
        return None
    undos = []
    for side in world.sides:
        with _told(world, side):
            undos.append(kind.change(side, drawn(number)))
    if undos[0] is not None:
        world.undos.append(undos)
    return None


def undo(world, draw):
    """One change of the models, any of them, or the last of those outside of them."""
    if world.undos and (not world.process or draw.random() < 0.6):
        undos = world.undos.pop(draw.randrange(len(world.undos)))
        for side, each in zip(world.sides, undos, strict=True):
            with _told(world, side):
                each(side)
    elif world.process:
        world.process.pop()()
    else:
        raise NotHere


class _told:
    """An error of both models is eager's; one of the injected model alone is a difference."""

    def __init__(self, world, side):
        self.world, self.side = world, side

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None or not isinstance(error, Exception) or isinstance(error, Differs):
            return False
        if self.side is self.world.twin:
            if isinstance(error, NotHere):
                return False
            raise Refused(repr(error)) from error
        raise Differs(f"{type(error).__name__}: {error}") from error


def compare(world, times=1):
    """The injected model against the other, `times` calls of each."""
    for _ in range(times):
        with _told(world, world.twin):
            want = eager = call(world, world.twin)
            if world.numerics != "exact":
                # a new injection of a model in the same state has cached nothing
                fresh = Side(copy.deepcopy(world.twin.model))
        if world.numerics != "exact":
            with _told(world, fresh):
                kw.inject(fresh.model, numerics=world.numerics)
                # at first sight the result may be that of the check, rounded differently
                call(world, fresh)
                want = call(world, fresh)
        with _told(world, world.ours):
            if world.numerics != "exact":
                call(world, world.ours)
            got = call(world, world.ours)
        if not same_bits(got[0], want[0]) and not _as_near(world, got[0], want[0], eager[0]):
            _check_repeats(world, want[0])
            raise Differs(difference(got[0], want[0]))
        world.once = None
        world.calls += 1
        if world.numerics == "exact" and world.ours.seen != world.twin.seen:
            raise Differs(f"called {_counts(world.ours)}, expected {_counts(world.twin)}")
        _gradients(got[1], want[1], _has_zeros(world.inputs))


def _check_repeats(world, want):
    """Raise Refused if eager itself gives other gradients from call to call: on a GPU some kernels
    of a backward add in the order in which their blocks finish."""
    if world.device != "cuda" or world.once is None:
        return
    for _ in range(3):
        gc.collect()  # a transform of a large model leaves most of the GPU's memory in cycles
        with _told(world, world.twin):
            again = call(world, world.twin)
        if not same_bits(again[0], want):
            world.once = None
            raise Refused("eager gives other gradients when it is called again")


def _has_zeros(inputs):
    """A norm over constant rows divides by almost zero: its gradient is noise."""
    return any(isinstance(v, torch.Tensor) and v.numel() and not v.any() for v in inputs.values())


def _as_near(world, got, want, eager):
    """Whether two results of a tier that may round differently are as close to each other as each
    must be to a float32 run: on a GPU, layers that are packed in one and not in the other use
    different GEMM algorithms. Where the tier itself is further off, as after a norm that amplifies
    errors, the injected model need not be nearer to eager than a new injection is. A stale result
    is off by far more."""
    if world.numerics == "exact" or difference(got, want).startswith("other"):
        return False
    got, want, eager = outputs(got), outputs(want), outputs(eager)
    bound = ERRORS[world.numerics]
    wide = all(t.dtype == torch.float32 for t in want)
    if wide and world.device == "cpu" and world.numerics == "fused":
        bound = FLOAT32_ERROR
    if any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(got, want, strict=True)):
        return False
    finite = [t.isfinite() for t in want]
    got, want, eager = ([t[f] for t, f in zip(s, finite, strict=True)] for s in (got, want, eager))
    if accuracy.error(got, want) <= 2 * bound:
        return True
    return accuracy.error(got, eager) <= AMPLIFIED * accuracy.error(want, eager)


def _counts(side):
    return dict(sorted(side.seen.items()))


def _gradients(got, want, noise):
    """On a GPU the kernels of a backward round differently: there, only that the same parameters
    have gradients, and finite ones where eager's are."""
    if got.keys() != want.keys():
        raise Differs(f"gradients of other parameters: {sorted(got.keys() ^ want.keys())[:4]}")
    for name, value in () if noise else want.items():
        if value is None:
            continue
        if value.is_cuda:
            if not (got[name].isfinite() | ~value.isfinite()).all():
                raise Differs(f"gradient of {name}: not finite")
            continue
        scale = value.abs().max().nan_to_num(1).item()
        wide = value.dtype in (torch.float32, torch.float64)
        bounds = GRADIENTS if wide else HALF_GRADIENTS
        near = {"rtol": bounds["rtol"], "atol": bounds["atol"] + bounds["rtol"] * scale}
        if not torch.allclose(got[name], value, equal_nan=True, **near):
            raise Differs(f"gradient of {name}: {difference([got[name]], [value])}")


def step(world, name, number, tally=None):
    """One change and the calls after it. False where eager refuses it; the world is then rebuilt,
    as half of the change may have been made."""
    world.done.append((name, number))
    note(world)
    tally = tally or Tally()
    refused = False
    try:
        change(world, name, number)
        if world.injected:
            compare(world, times=1 + number % 2)
    except NotHere:
        world.done.pop()
        return False
    except Refused:
        refused = True
    except Differs as error:
        tally.differences.append((world.replay(), str(error)))
        raise Differs(f"after {name}: {error}\n{world.replay()}") from error
    if refused:  # outside `except`, whose traceback keeps the tensors of the refused call
        tally.refused[name] += 1
        world.close()
        world.reset()
        world.done.clear()
        _injected(world, tally)
        return False
    tally.steps += 1
    tally.kinds[name] += 1
    return True


def note(world):
    """Write down the step that begins, and the sequence that it belongs to."""
    if UNDER_WAY:
        Path(UNDER_WAY).write_text(f"{world.replay()}\n{world.drawn_as}\n")


def sequence(preset, seed, steps=12, names=None, tally=None, **how):
    """`steps` changes drawn from a seed, up to two of them before the model is injected."""
    draw = drawn(f"{preset} {seed} {sorted(map(str, how.items()))}")
    with World(preset, **how) as world:
        world.drawn_as = f"sequence({preset!r}, {seed})"
        before = draw.choice((0, 0, 1, 2))
        names = names or names_for(world)
        for number in range(steps):
            if not world.injected and number >= before:
                _injected(world, tally)
            for _ in range(30):
                if step(world, draw.choice(names), draw.randrange(10**6), tally):
                    break
        return world.calls


def _injected(world, tally):
    world.done.append(("inject", 0))
    note(world)
    try:
        world.inject()
        compare(world, times=2)
    except Refused:
        world.done.pop()
    except Differs as error:
        if tally is not None:
            tally.differences.append((world.replay(), str(error)))
        raise Differs(f"after inject: {error}\n{world.replay()}") from error


def replay(preset, done, **how):
    """Repeat the sequence that a failure printed."""
    with World(preset, **how) as world:
        if ("inject", 0) not in done:
            done = [("inject", 0), *done]
        for name, number in done:
            if name == "inject":
                _injected(world, None)
            else:
                step(world, name, number)


def alone(preset, name, number=0, tally=None, **how):
    """One change after the model was called, and its undoing. False if it does not apply."""
    with World(preset, **how) as world:
        _injected(world, tally)
        wanted = KINDS[name].after
        if not all(step(world, n, number, tally) for n in (*wanted, name)):
            return False
        compare_again(world, name)
        while world.undos or world.process:
            if not step(world, UNDO, number, tally):
                break
        return True


def compare_again(world, name):
    try:
        compare(world)
    except Refused:
        pass
    except Differs as error:
        raise Differs(f"the second time after {name}: {error}\n{world.replay()}") from error
