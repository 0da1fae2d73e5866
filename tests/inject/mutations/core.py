"""Two models in the same state, one injected and one not, and the changes made to both.

A change is a function of a side (a model and what was counted on it) or of the whole world (the
inputs, how the model is called, switches of the process). It is drawn from a number, so that both
sides get the same one and a failure can be replayed. What it returns undoes it.
"""

import copy
import gc
import random
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

import kernelwright as kw
from inject.harness import tensors
from kernelwright import models

KINDS = {}


class NotHere(Exception):
    """The change does not apply to this model as it is; nothing was changed."""


class Refused(Exception):
    """Eager itself fails here: it says nothing about injection."""


class Differs(AssertionError):
    """The injected model behaves differently from the one that is not."""


@dataclass
class Kind:
    name: str
    change: object
    of_models: bool
    exact_only: bool = False  # keeps state in the model that a copy cannot take over
    on_gpu: bool = False  # there is nothing to change without one
    after: tuple = ()  # kinds without which there is nothing to see


def on_models(name, **how):
    """Registers a change of one model: `change(side, draw)` returns None or `undo(side)`."""
    return _register(name, True, **how)


def on_world(name, **how):
    """Registers a change of anything else: `change(world, draw)` returns None or `undo()`."""
    return _register(name, False, **how)


def _register(name, of_models, **how):
    def register(change):
        assert name not in KINDS, name
        KINDS[name] = Kind(name, change, of_models, **how)
        return change

    return register


class Seen(Counter):
    """Counts for one side, however often its model is copied."""

    def __deepcopy__(self, memo):
        return self


@dataclass
class Side:
    model: object
    seen: Counter = field(default_factory=Seen)  # calls of hooks and processors
    handles: list = field(default_factory=list)  # of what is registered for the whole process
    originals: list = field(default_factory=list)  # models that were copied

    def modules(self, wanted):
        """Names of the modules that `wanted` accepts, the same on both sides."""
        return [n for n, m in self.model.named_modules() if n and wanted(m)]

    def pick(self, draw, wanted):
        names = self.modules(wanted)
        if not names:
            raise NotHere
        return draw.choice(names)

    def at(self, name):
        return self.model.get_submodule(name)


class World:
    """A preset's model twice, its inputs, and everything that was done to them."""

    def __init__(
        self, preset, numerics="exact", graphs=False, device="cpu", dtype=torch.float32, tiny=True
    ):
        self.preset, self.numerics, self.graphs = preset, numerics, graphs
        self.device, self.first_dtype, self.tiny = device, dtype, tiny
        self.done, self.calls = [], 0
        self.drawn_as = ""  # the sequence that the changes are from
        self.process = []  # undoes changes outside of the models, the last one first
        self.reset()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Undo all changes outside of the models."""
        while self.process:
            self.process.pop()()
        for side in self.sides:
            for handle in side.handles:
                handle.remove()

    def reset(self):
        """Begin again: models and inputs as they were at first, without injection."""
        self.dtype, self.seed = self.first_dtype, 0
        self.sizes = dict(SIZES.get((self.preset, self.numerics if self.tiny else "full size"), {}))
        self.twin = self.ours = None  # freed before others are built
        if self.device == "cuda":
            gc.collect()
        self.twin, self.ours = (Side(m) for m in self._built())
        self.injected = False
        self.ways = {}  # by name: what a call happens in, given its model
        self.undos = []  # of changes of models
        self.once = None  # what is called instead, for one step
        self.renew()

    def _built(self):
        how = (self.preset, self.tiny, self.dtype, self.device)
        if how not in BUILT:
            if not self.tiny:
                BUILT.clear()
            BUILT[how] = models.build(
                self.preset, tiny=self.tiny, dtype=self.dtype, device=self.device
            )
        return copy.deepcopy(BUILT[how]), copy.deepcopy(BUILT[how])

    def renew(self, **sizes):
        """Other inputs, of these sizes; tensors are new objects."""
        self.seed += 1
        made = models.inputs(
            self.preset,
            tiny=self.tiny,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            **{**self.sizes, **sizes},
        )
        self.sizes |= sizes
        self.inputs = made

    @property
    def sides(self):
        return self.twin, self.ours

    def inject(self):
        how = {"graphs": True} if self.graphs else {}
        report = kw.inject(self.ours.model, numerics=self.numerics, **how)
        self.injected = True
        return report

    def replay(self):
        """The line that repeats what was done."""
        how = {"graphs": self.graphs} if self.graphs else {}
        how |= {} if self.device == "cpu" else {"device": self.device, "dtype": self.first_dtype}
        how |= {} if self.tiny else {"tiny": False}
        more = "".join(f", {k}={v!r}" for k, v in how.items())
        return f"replay({self.preset!r}, {self.done!r}, numerics={self.numerics!r}{more})"


# layers with fewer than 64 rows do not run in fp8
SIZES = {
    ("ltx-video", "fp8"): {"height": 128, "width": 128, "frames": 33},
    ("flux-dev", "fp8"): {"height": 256, "width": 256},
    ("llama-3-8b", "fp8"): {"tokens": 80},
    # a transform of torch.func keeps the matrices of attention of all layers: 100 GB at 49 frames
    ("ltx-video", "full size"): {"height": 480, "width": 704, "frames": 17},
}
BUILT = {}


def drawn(number):
    return random.Random(number)


def noise(draw, like):
    """Numbers for a tensor like this one, the same on both sides."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def outputs(result):
    return [t.detach() for t in tensors(result)]


def same_bits(a, b):
    """torch.equal, with NaN equal to NaN."""
    a, b = outputs(a), outputs(b)
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


def difference(a, b):
    a, b = outputs(a), outputs(b)
    if [(t.shape, t.dtype) for t in a] != [(t.shape, t.dtype) for t in b]:
        return "other shapes or dtypes"
    both = zip(a, b, strict=True)
    off = [(x.double() - y.double()).abs().nan_to_num(float("inf")).max() for x, y in both]
    return f"off by {max(off, default=torch.zeros(())).item():.3g}"


@contextmanager
def without_cudnn_attention():
    """PyTorch 2.11 looks up cuDNN's plan for the backward of an attention by the layouts of query,
    key and value, and not by that of the gradient. FLUX has gradients of two layouts, as the rows
    of its single blocks lie in wider ones: with their plan, its double blocks read past the end of
    theirs. Without injection too, its gradients are wrong then, or an address is illegal."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def call(world, side):
    """The result of one call in the current way, with gradients where they are recorded."""
    model = side.model
    torch.manual_seed(world.seed)
    with ExitStack() as stack:
        for way in list(world.ways.values()):
            stack.enter_context(way(model))
        if world.device == "cuda" and (world.once is not None or "gradients" in world.ways):
            stack.enter_context(without_cudnn_attention())
        if world.once is not None:
            return world.once(model, world.inputs), {}
        with torch.set_grad_enabled("gradients" in world.ways and torch.is_grad_enabled()):
            result = model(**world.inputs)
            found = outputs(result)
            if not torch.is_grad_enabled():
                return found, {}
            needed = [t for t in tensors(result) if t.requires_grad]
            if not needed:
                return found, {"": None}
            model.zero_grad()
            sum(t.float().square().mean() for t in needed).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found, grads
