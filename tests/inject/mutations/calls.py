"""The inputs of a model, how it is called, and PyTorch's switches around the call."""

from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import kernelwright as kw

from .core import NotHere, noise, on_world
from .weights import over

PROMPT = "encoder_hidden_states"
LATENTS = ("hidden_states", "sample")


def latents(world):
    return next((k for k in LATENTS if k in world.inputs), None) or _none()


def _none():
    raise NotHere


def prompt(world):
    if PROMPT not in world.inputs:
        raise NotHere
    return world.inputs[PROMPT]


def given(world, name, value):
    world.inputs = {**world.inputs, name: value}


@on_world("inputs.all new")
def new_inputs(world, draw):
    world.renew()


@on_world("inputs.other latents")
def other_latents(world, draw):
    name = latents(world)
    given(world, name, noise(draw, world.inputs[name]))


@on_world("inputs.latents written in place")
def latents_in_place(world, draw):
    value = world.inputs[latents(world)]
    value.copy_(noise(draw, value))


@on_world("inputs.another prompt")
def another_prompt(world, draw):
    given(world, PROMPT, noise(draw, prompt(world)))


@on_world("inputs.a prompt at the address of the last")
def same_address(world, draw):
    """The old one is freed first, so the allocator may reuse its memory."""
    values, inputs = noise(draw, prompt(world)), dict(world.inputs)
    world.inputs = {}
    del inputs[PROMPT]
    world.inputs = {**inputs, PROMPT: values.clone()}


@on_world("inputs.prompt copy_")
def prompt_in_place(world, draw):
    prompt(world).copy_(noise(draw, prompt(world)))


@on_world("inputs.prompt through .data")
def prompt_data(world, draw):
    prompt(world).data.mul_(1.25)


@on_world("inputs.prompt through the storage")
def prompt_storage(world, draw):
    with torch.no_grad():
        over(prompt(world)).mul_(0.75)


@on_world("inputs.prompt through numpy")
def prompt_numpy(world, draw):
    value = prompt(world)
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        raise NotHere
    array = value.numpy()
    array += 0.125


@on_world("inputs.an inference tensor as the prompt")
def inference_prompt(world, draw):
    """It has no version counter."""
    with torch.inference_mode():
        made = prompt(world).clone()
        made.mul_(draw.choice((0.5, 1.5)))
    given(world, PROMPT, made)


@on_world("inputs.another size")
def resolution(world, draw):
    by = {"height": 32, "width": 64, "side": 16, "frames": 8, "tokens": 5, "text": 3, "batch": 1}
    sizes = world_sizes(world)
    name = draw.choice(sorted(n for n in sizes if n in by))
    wanted = max(sizes[name] + draw.choice((-1, 1)) * by[name], by[name])
    if wanted == sizes[name]:
        raise NotHere
    world.renew(**{name: wanted})


def world_sizes(world):
    from kernelwright import models

    found = models.presets()[world.preset]
    return {**(found.tiny_sizes if world.tiny else found.sizes), **world.sizes}


@on_world("inputs.NaN among the latents")
def nan(world, draw):
    name = latents(world)
    value = world.inputs[name].clone()
    value.view(-1)[draw.randrange(value.numel())] = float("nan")
    given(world, name, value)


@on_world("inputs.NaN in the prompt")
def nan_prompt(world, draw):
    value = prompt(world).clone()
    value.view(-1)[draw.randrange(value.numel())] = float("nan")
    given(world, PROMPT, value)


@on_world("inputs.zeros")
def zeros(world, draw):
    name = draw.choice(sorted(set(world.inputs) & {*LATENTS, PROMPT}) or _none())
    given(world, name, torch.zeros_like(world.inputs[name]))


@on_world("inputs.a strided view")
def strided(world, draw):
    name = latents(world)
    value = world.inputs[name]
    given(world, name, torch.cat((value, value + 1), dim=-1)[..., : value.shape[-1]])


@on_world("inputs.a negated view")
def negated(world, draw):
    name = latents(world)
    given(world, name, torch._neg_view(world.inputs[name]))


@on_world("inputs.another timestep")
def timestep(world, draw):
    if "timestep" not in world.inputs:
        raise NotHere
    given(world, "timestep", world.inputs["timestep"] * 0 + draw.randrange(1, 900))


@on_world("inputs.a mask written in place")
def mask(world, draw):
    found = [v for k, v in world.inputs.items() if "mask" in k]
    if not found:
        raise NotHere
    found[0][:, draw.randrange(found[0].shape[1])] = draw.choice((0, 1))


def toggled(world, name, way):
    """Call in this way from now on; `NotHere` if it is on already. Returns the undo."""
    if name in world.ways:
        raise NotHere
    world.ways[name] = way

    def undo():
        world.ways.pop(name, None)

    return undo


@on_world("calls.autocast")
def autocast(world, draw):
    return toggled(world, "autocast", lambda m: torch.autocast(world.device, torch.bfloat16))


@on_world("calls.inference_mode")
def inference(world, draw):
    return toggled(world, "inference", lambda m: torch.inference_mode())


@on_world("calls.gradients")
def gradients(world, draw):
    return toggled(world, "gradients", lambda m: torch.enable_grad())


@on_world("calls.nested injected")
def nested(world, draw):
    """Another injection around each call, of the one that is injected; eager stays eager."""

    def way(model):
        if model is not world.ours.model:
            return nullcontext()
        return kw.injected(model, numerics=world.numerics)

    return toggled(world, "nested", way)


@on_world("calls.deterministic algorithms")
def deterministic(world, draw):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(before, warn_only=True)


SDPA = ("flash", "mem_efficient", "math", "cudnn")


@on_world("calls.a switch of attention")
def sdpa(world, draw):
    name = draw.choice(SDPA)
    enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
    switch = getattr(torch.backends.cuda, f"enable_{name}_sdp")
    before = enabled()
    switch(not before)
    return lambda: switch(before)


@on_world("calls.float32 precision")
def precision(world, draw):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    return lambda: torch.set_float32_matmul_precision(before)


@on_world("calls.reduced precision of reductions")
def reductions(world, draw):
    at = torch.backends.cuda.matmul
    before = at.allow_bf16_reduced_precision_reduction
    at.allow_bf16_reduced_precision_reduction = not before
    return lambda: setattr(at, "allow_bf16_reduced_precision_reduction", before)


@on_world("calls.default dtype")
def default_dtype(world, draw):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before == torch.float32 else torch.float32)
    return lambda: torch.set_default_dtype(before)


@on_world("calls.functional_call")
def functional(world, draw):
    """Other parameters for one call, those of the model before and after it."""
    factor = draw.choice((0.5, 1.2))
    modules = world.twin.model.named_modules
    if len(list(modules(remove_duplicate=False))) > len(list(modules())):
        raise NotHere  # PyTorch does not restore all parameters of a module that occurs twice

    def once(model, inputs):
        others = {n: p.detach() * factor for n, p in model.named_parameters()}
        return torch.func.functional_call(model, others, (), inputs)

    world.once = once


def transformed(world):
    """The model as a function of its latents, for the transforms of torch.func."""
    if any("_diffusers_hook" in vars(m) for m in world.twin.model.modules()):
        raise NotHere  # offload that swaps weights inside a transform crashes PyTorch
    name = latents(world)

    def function(model, inputs):
        return lambda x: pytree.tree_leaves(model(**{**inputs, name: x}))[0]

    return name, function


@contextmanager
def repeatable():
    """PyTorch's deterministic kernels: the usual backward of attention on a GPU adds in an order
    that changes from run to run, so eager itself would not give the same gradients twice. That of
    cuDNN and of the efficient kernel has no other."""
    attention = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(attention, set_priority=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@on_world("calls.torch.func.grad")
def func_grad(world, draw):
    name, function = transformed(world)

    def once(model, inputs):
        with repeatable():
            gradient = torch.func.grad(lambda x: function(model, inputs)(x).square().mean())
            return gradient(inputs[name])

    world.once = once


@on_world("calls.torch.func.jvp")
def jvp(world, draw):
    name, function = transformed(world)
    tangent = noise(draw, world.inputs[name])

    def once(model, inputs):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no forward-mode derivative
            return torch.func.jvp(function(model, inputs), (inputs[name],), (tangent,))

    world.once = once


@on_world("calls.torch.func.vmap")
def vmap(world, draw):
    name, function = transformed(world)

    def once(model, inputs):
        return torch.func.vmap(function(model, inputs))(torch.stack((inputs[name],) * 2))

    world.once = once
