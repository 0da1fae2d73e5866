"""Parts of a model that change: norms, activations, forwards, processors, attributes."""

from functools import partial

from torch import nn

from .core import NotHere, on_models, on_world
from .weights import has_weight, is_linear

ACTIVATIONS = ("act_fn", "act", "act_1", "nonlinearity", "activation")
EPS = ("eps", "variance_epsilon")


def scaled(result, factor=1.5):
    """What a module returned, its first tensor scaled."""
    if isinstance(result, tuple):
        return (scaled(result[0], factor), *result[1:])
    return result * factor


def norms(module):
    return "Norm" in type(module).__name__ and not list(module.children())


def attentions(module):
    return "Attention" in type(module).__name__ and any(map(is_linear, module.modules()))


def blocks(module):
    return "Block" in type(module).__name__ or "DecoderLayer" in type(module).__name__


def with_processor(module):
    return getattr(module, "processor", None) is not None


WRAPPED = {
    "norm": norms,
    "linear": is_linear,
    "attention": attentions,
    "feed-forward": lambda m: type(m).__name__ in ("FeedForward", "LlamaMLP", "Qwen3MLP"),
    "block": blocks,
}


@on_models("parts.eps of one norm")
def one_eps(side, draw):
    return set_eps(side, [side.pick(draw, has_eps)])


@on_models("parts.eps of all norms")
def all_eps(side, draw):
    return set_eps(side, side.modules(has_eps))


def has_eps(module):
    return any(isinstance(getattr(module, e, None), float) for e in EPS)


def set_eps(side, names):
    before = [_set_eps(side.at(name), 0.25) for name in names]

    def undo(side):
        for name, value in zip(names, before, strict=True):
            _set_eps(side.at(name), value)

    return undo


def _set_eps(module, value):
    name = next(e for e in EPS if isinstance(getattr(module, e, None), float))
    before = getattr(module, name)
    setattr(module, name, value)
    return before


@on_models("parts.an activation swapped")
def activation(side, draw):
    places = [
        (name, a)
        for name, m in side.model.named_modules()
        for a in ACTIVATIONS
        if isinstance(m._modules.get(a), nn.Module)
    ]
    if not places:
        raise NotHere
    place, other = draw.choice(places), draw.choice((nn.ReLU, nn.Tanh, nn.SiLU))
    return swap(side, *place, other())


def swap(side, parent, child, new):
    """Replace a module by another; returns the undo."""
    holder = side.model.get_submodule(parent)
    before = holder._modules[child]
    setattr(holder, child, new)

    def undo(side):
        setattr(side.model.get_submodule(parent), child, before)

    return undo


class Glu(nn.Module):
    def __init__(self, proj):
        super().__init__()
        self.proj = proj

    def forward(self, x):
        first, second = self.proj(x).chunk(2, dim=-1)
        return first * second.sigmoid()


@on_models("parts.ff.net[0] swapped")
def feed_forward(side, draw):
    name = side.pick(draw, lambda m: isinstance(getattr(m, "net", None), nn.ModuleList))
    step = side.at(name).net[0]
    gated = step.proj.out_features != side.at(name).net[2].in_features
    new = Glu(step.proj) if gated else nn.Sequential(step.proj, nn.ReLU())
    return swap(side, f"{name}.net", "0", new)


class Doubled(nn.Module):
    """Resembles no known norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, *args, **kwargs):
        return scaled(self.norm(*args, **kwargs), 2.0)


@on_models("parts.a norm of another class")
def norm(side, draw):
    name = side.pick(draw, norms)
    before = side.at(name)
    new = draw.choice((Doubled, lambda n: nn.LayerNorm(n.weight.shape, eps=0.1)))(before)
    parent, _, child = name.rpartition(".")
    return swap(side, parent, child, new.to(next(side.model.parameters())))


class Writes(nn.Module):
    """Writes to what a module returned, as the code of a model may."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        result = self.module(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first += 0.125
        return result


def projections(module):
    return "Projection" in type(module).__name__


@on_models("parts.a result written to")
def written(side, draw):
    kind = draw.choice((norms, blocks, projections, *WRAPPED.values()))
    name = side.pick(draw, kind)
    parent, _, child = name.rpartition(".")
    return swap(side, parent, child, Writes(side.at(name)))


def subclass(kind, method, factor=0.5):
    """A class of the same name and module, with a different method."""
    usual = getattr(kind, method)

    def changed(self, *args, **kwargs):
        return scaled(usual(self, *args, **kwargs), factor)

    more = {method: changed, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), more)


@on_models("parts.__class__ of the same name")
def same_name(side, draw):
    module = side.at(side.pick(draw, WRAPPED[draw.choice(list(WRAPPED))]))
    before = type(module)
    module.__class__ = subclass(before, "forward")

    def undo(side):
        module.__class__ = before

    return undo


def _scaled(forward, *args, **kwargs):
    return scaled(forward(*args, **kwargs))


def _counting(forward, name, seen, *args, **kwargs):
    seen[name] += 1
    return forward(*args, **kwargs)


def wrapping(wanted):
    def wrapped(side, draw):
        module = side.at(side.pick(draw, wanted))
        had, before = "forward" in vars(module), module.forward
        # not a closure: in a copy of the model it calls the copy of the module
        module.forward = partial(_scaled, before)

        def undo(side):
            if had:
                module.forward = before
            else:
                vars(module).pop("forward", None)

        return undo

    return wrapped


for part, wanted in WRAPPED.items():
    on_models(f"parts.forward wrapped: {part}")(wrapping(wanted))


@on_models("parts.forwards wrapped that count")
def counted(side, draw):
    """User code with a side effect that must happen once per call."""
    wanted = WRAPPED[draw.choice(list(WRAPPED))]
    undos = [_count(side.at(name), name, side.seen) for name in side.modules(wanted)]

    def undo(side):
        for each in undos:
            each()

    return undo


@on_models("parts.all norms wrapped so that they count")
def counted_norms(side, draw):
    undos = [_count(side.at(name), name, side.seen) for name in side.modules(norms)]

    def undo(side):
        for each in undos:
            each()

    return undo


def _count(module, name, seen):
    had, before = "forward" in vars(module), module.forward
    module.forward = partial(_counting, before, name, seen)
    return lambda: setattr(module, "forward", before) if had else vars(module).pop("forward", None)


def patch(owner, name, value):
    """Change a class; returns the undo."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def undo():
        setattr(owner, name, before) if had else delattr(owner, name)

    return undo


def patching(wanted):
    def patched(world, draw):
        name = world.twin.pick(draw, wanted)
        kind = type(world.twin.at(name))
        if type(world.ours.at(name)) is not kind:
            raise NotHere
        usual = kind.forward
        return patch(kind, "forward", lambda self, *a, **k: scaled(usual(self, *a, **k), 1.25))

    return patched


for part, wanted in WRAPPED.items():
    on_world(f"parts.class patched: {part}")(patching(wanted))


@on_world("parts.the __call__ of a processor class patched")
def processor_patched(world, draw):
    name = world.twin.pick(draw, with_processor)
    kind = type(world.twin.at(name).processor)
    if type(world.ours.at(name).processor) is not kind:
        raise NotHere  # each side has a class of its own
    usual = kind.__call__
    return patch(kind, "__call__", lambda self, *a, **k: scaled(usual(self, *a, **k), 0.75))


@on_models("parts.a processor of the same name")
def processor(side, draw):
    module = side.at(side.pick(draw, with_processor))
    before = module.processor
    module.processor = subclass(type(before), "__call__")()
    module.processor.__dict__.update(vars(before))

    def undo(side):
        module.processor = before

    return undo


class Counting:
    """An unknown processor."""

    def __init__(self, inner, seen, name):
        self.inner, self.seen, self.name = inner, seen, name

    def __call__(self, *args, **kwargs):
        self.seen[self.name] += 1
        return self.inner(*args, **kwargs)

    def __deepcopy__(self, memo):
        return self


@on_models("parts.a processor that counts")
def counting(side, draw):
    names = side.modules(with_processor)
    if not names:
        raise NotHere
    before = {name: side.at(name).processor for name in names}
    for name in names:
        side.at(name).processor = Counting(before[name], side.seen, f"{name}.processor")

    def undo(side):
        for name in names:
            side.at(name).processor = before[name]

    return undo


@on_models("parts.an attribute of attention")
def attribute(side, draw):
    """The scale of its scores, a plain attribute."""
    module = side.at(side.pick(draw, lambda m: isinstance(getattr(m, "scaling", None), float)))
    before = module.scaling
    module.scaling = before * 1.5

    def undo(side):
        module.scaling = before

    return undo


@on_models("parts.a block left out, another twice")
def other_blocks(side, draw):
    stacks = ("transformer_blocks", "single_transformer_blocks", "blocks", "model.layers")
    found = [s for s in stacks if _stack(side.model, s) is not None]
    if not found:
        raise NotHere
    name = draw.choice(found)
    parent, _, child = name.rpartition(".")
    old = side.model.get_submodule(name)
    return swap(side, parent, child, nn.ModuleList([old[0], old[0], *old[2:]]))


def _stack(model, name):
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return None
    return found if isinstance(found, nn.ModuleList) and len(found) > 1 else None


@on_models("parts.a Linear without parameters")
def plain_weight(side, draw):
    """Its weight is a plain attribute."""
    module = side.at(side.pick(draw, lambda m: type(m) is nn.Linear and has_weight(m)))
    if module.weight.is_meta:
        raise NotHere  # offload: its values are elsewhere
    values = module.weight.detach().clone() * 1.1
    del module.weight
    module.weight = values
