"""The model as a whole: copies, files, dtypes, repeated injection, and features of libraries."""

import copy
import io
import pickle
from contextlib import nullcontext

import torch

import kernelwright as kw
from inject.harness import left_behind

from .core import Differs, NotHere, Refused, on_models, on_world


@on_models("life.deepcopy")
def copied(side, draw):
    side.originals.append(side.model)  # a reference to it may be kept, or not
    side.model = copy.deepcopy(side.model)
    if draw.random() < 0.5:
        side.originals.clear()


@on_models("life.pickle", exact_only=True)
def pickled(side, draw):
    """The copy may be injected or not."""
    side.model = pickle.loads(pickle.dumps(side.model))
    for module in side.model.modules():
        # unpickling turns a forward of the instance into the class's forward at that time
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward


@on_world("life.torch.save of the state")
def state(world, draw):
    """Both models have the same state, and load it from a file."""
    found = []
    for side in world.sides:
        file = io.BytesIO()
        torch.save(side.model.state_dict(), file)
        file.seek(0)
        found.append(torch.load(file, map_location=world.device))
        side.model.load_state_dict(found[-1])
    first, second = found
    if first.keys() != second.keys():
        raise Differs(f"state_dict: {sorted(first.keys() ^ second.keys())[:4]}")
    for name, value in first.items():
        if not torch.equal(value.nan_to_num(), second[name].nan_to_num()):
            raise Differs(f"state_dict: {name}")


@on_world("life.restore and inject")
def again(world, draw):
    if not world.injected:
        raise NotHere
    before = left_behind(world.twin.model)
    kw.restore(world.ours.model)
    if left := set(left_behind(world.ours.model)) ^ set(before):
        raise Differs(f"restore left a forward on {sorted(left)[:4]}")
    world.inject()


@on_world("life.inject again")
def twice(world, draw):
    if not world.injected:
        raise NotHere
    world.inject()


@on_world("life.dtype")
def dtype(world, draw):
    choices = [torch.float32, torch.bfloat16]
    choices += [torch.float64] if world.device == "cpu" else [torch.float16]
    world.dtype = draw.choice([c for c in choices if c != world.dtype])
    for side in world.sides:
        side.model.to(world.dtype)
    world.renew()


@on_models("life.to the CPU and back", on_gpu=True)
def moved(side, draw):
    device = next(side.model.parameters()).device
    if device.type == "cpu":
        raise NotHere
    side.model.cpu()
    side.model.to(device)


@on_models("life.train or eval")
def training(side, draw):
    before = side.model.training
    side.model.train(not before)

    def undo(side):
        side.model.train(before)

    return undo


@on_models("life.gradient checkpointing", after=("life.train or eval", "calls.gradients"))
def checkpointing(side, draw):
    model = side.model
    if not hasattr(model, "enable_gradient_checkpointing"):
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise NotHere
        model.gradient_checkpointing_enable()
        return lambda side: side.model.gradient_checkpointing_disable()
    if not model._supports_gradient_checkpointing:
        raise NotHere
    model.enable_gradient_checkpointing()
    return lambda side: side.model.disable_gradient_checkpointing()


@on_models("life.freeu")
def freeu(side, draw):
    if not hasattr(side.model, "enable_freeu"):
        raise NotHere
    side.model.enable_freeu(s1=0.9, s2=0.2, b1=draw.choice((1.2, 1.4)), b2=1.4)
    return lambda side: side.model.disable_freeu()


@on_models("life.fuse_qkv_projections")
def fused_projections(side, draw):
    if not hasattr(side.model, "fuse_qkv_projections"):
        raise NotHere
    side.model.fuse_qkv_projections()
    return lambda side: side.model.unfuse_qkv_projections()


@on_world("life.attention backend")
def backend(world, draw):
    """`set_attention_backend` also sets it for the process, which resetting does not undo."""
    if not hasattr(world.twin.model, "set_attention_backend"):
        raise NotHere
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before, name = registry._active_backend, draw.choice(("native", "_native_math"))
    for side in world.sides:
        side.model.set_attention_backend(name)

    def undo():
        for side in world.sides:
            side.model.reset_attention_backend()
        registry._active_backend = before

    return undo


@on_models("life.attention implementation")
def implementation(side, draw):
    if not hasattr(side.model, "set_attn_implementation"):
        raise NotHere
    before = side.model.config._attn_implementation
    side.model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    return lambda side: side.model.set_attn_implementation(before)


@on_models("life.sequential offload")
def offload(side, draw):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    if any(p.is_meta for p in side.model.parameters()):
        raise NotHere
    cpu_offload(side.model, execution_device=next(side.model.parameters()).device)
    return lambda side: remove_hook_from_module(side.model, recurse=True)


@on_models("life.group offload", exact_only=True)
def group_offload(side, draw):
    from diffusers.hooks import apply_group_offloading

    if not hasattr(side.model, "enable_group_offload"):
        raise NotHere
    apply_group_offloading(
        side.model,
        onload_device=next(side.model.parameters()).device,
        offload_device=torch.device("cpu"),
        offload_type=draw.choice(("leaf_level", "block_level")),
        num_blocks_per_group=1,
    )


def cache_configs():
    import diffusers

    def named(name, **how):
        kind = getattr(diffusers, name, None)
        return {} if kind is None else {name: lambda: kind(**how)}

    return {
        **named("FirstBlockCacheConfig", threshold=0.2),
        **named("TaylorSeerCacheConfig", cache_interval=3, disable_cache_before_step=1),
        **named(
            "PyramidAttentionBroadcastConfig",
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 901),
            current_timestep_callback=lambda: 100,
        ),
    }


@on_world("life.enable_cache", exact_only=True)
def cache(world, draw):
    model = world.twin.model
    if not hasattr(model, "enable_cache") or model.is_cache_enabled or "cache" in world.ways:
        raise NotHere
    make = draw.choice(list(cache_configs().values()))
    for side in world.sides:
        try:
            side.model.enable_cache(make())
        except Exception as error:
            if side is world.ours:
                raise Differs(f"enable_cache: {error!r}") from error
            raise Refused(repr(error)) from error
    world.ways["cache"] = lambda m: (
        m.cache_context("cond") if getattr(m, "is_cache_enabled", False) else nullcontext()
    )

    def undo():
        world.ways.pop("cache", None)
        for side in world.sides:
            if side.model.is_cache_enabled:
                side.model.disable_cache()

    return undo
