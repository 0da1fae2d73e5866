"""Private names of diffusers, transformers, accelerate and peft that this library relies on.

None of them is imported here: before a library is imported, none of its objects exist. A name that
a later version takes away makes tests/test_internals.py fail.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

# diffusers and accelerate replace the forward of an instance, keep the inner one, and leave these
# attributes on the module
DIFFUSERS_HOOKS = "_diffusers_hook"
ACCELERATE_HOOK = "_hf_hook"
ACCELERATE_FORWARD = "_old_forward"
HOOK_ATTRIBUTES = ("forward", ACCELERATE_FORWARD, ACCELERATE_HOOK, DIFFUSERS_HOOKS)
# the function of diffusers' attention_dispatch that all backends call for context parallelism
PARALLEL_FUNCTION = "_templated_context_parallel_attention"
# where transformers keeps a loss that was set in place of a model's own
OWN_LOSS = "_loss_function"
# where transformers has the hooks by which models collect what their layers return
OUTPUT_HOOKS = "transformers.utils.output_capturing"


def has_library_hook(module: nn.Module) -> bool:
    """Whether accelerate or diffusers has wrapped the forward of a module."""
    own = vars(module)
    return ACCELERATE_HOOK in own or DIFFUSERS_HOOKS in own


def diffusers_hooks(module: nn.Module) -> dict[str, Any] | None:
    """The hooks of diffusers on a module (caches, group offload, context parallelism) by name."""
    registry = vars(module).get(DIFFUSERS_HOOKS)
    return None if registry is None else registry.hooks


def forward_slots(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, value) of every place that holds a forward of this module."""
    own = module.__dict__
    for name in ("forward", ACCELERATE_FORWARD):
        if name in own:
            yield own, name, own[name]
    for reference in getattr(own.get(DIFFUSERS_HOOKS), "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            if (value := getattr(reference, name, None)) is not None:
                yield reference, name, value


def accelerate_moves_weights(module: nn.Module) -> str | None:
    """The name of an accelerate hook, unless it only brings inputs to where the weights stay."""
    return _moves_weights(vars(module).get(ACCELERATE_HOOK))


def _moves_weights(hook: Any) -> str | None:
    if hook is None:
        return None
    name = type(hook).__name__
    if name == "SequentialHook":
        return next(filter(None, map(_moves_weights, hook.hooks)), None)
    return None if name == "AlignDevicesHook" and not hook.offload else name


def collects_outputs(hook: Any) -> bool:
    """Whether a hook is how a model of transformers collects the hidden states it returns."""
    return getattr(hook, "__module__", None) == OUTPUT_HOOKS


def collecting_outputs() -> bool:
    """Whether a model of transformers around this call collects what its layers return."""
    collector = getattr(sys.modules.get(OUTPUT_HOOKS), "_active_collector", None)
    return collector is not None and bool(collector.get())


def peft_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that are layers of peft, around layers of the model."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    return [] if kind is None else [m for m in modules if isinstance(m, kind)]


def base_layer(module: nn.Module) -> nn.Module | None:
    """The layer that an adapter has been put around."""
    return module._modules.get("base_layer")


def peft_children(layer: nn.Module) -> Iterator[nn.Module]:
    """What a layer of peft holds beside the layer it is around."""
    return (child for name, child in layer.named_children() if name != "base_layer")


def peft_scales(layer: nn.Module) -> Iterable[Any]:
    """The scale of each adapter of a layer: numbers, or tensors for hot-swapping."""
    return (vars(layer).get("scaling") or {}).values()


def attention_dispatch() -> Any:
    """The module in which diffusers calls attention, or None before its import."""
    return sys.modules.get("diffusers.models.attention_dispatch")


def active_attention_backend() -> Any:
    """The attention backend that diffusers takes for all models, or None before its import."""
    dispatch = attention_dispatch()
    return dispatch and dispatch._AttentionBackendRegistry._active_backend


def repeated_blocks(model: Any) -> tuple[str, ...]:
    """The classes of blocks that diffusers or transformers name as repeated, or not to be split."""
    named = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    return tuple(named or ())


def processor_choices(processor: Any) -> tuple[Any, Any]:
    """The attention backend and the context parallelism set on an attention processor."""
    return processor._attention_backend, processor._parallel_config


def exchanges_tensors(module: nn.Module) -> bool:
    """Whether the attention of a module exchanges tensors with other processes."""
    return getattr(vars(module).get("processor"), "_parallel_config", None) is not None


def reset_cache(model: Any) -> None:
    """Have a cache of diffusers (`enable_cache`) begin a new loop."""
    model._reset_stateful_cache()


CACHES = "transformers.cache_utils"
CACHE_ARGUMENT = "past_key_values"  # what layers call the cache that they are given


def is_kv_cache(value: Any) -> bool:
    """Whether this is a cache of keys and values of transformers."""
    kind = getattr(sys.modules.get(CACHES), "Cache", None)
    return kind is not None and isinstance(value, kind)


def is_shared_states(value: Any) -> bool:
    """Whether this is what some models of transformers pass all their layers, for the keys and
    values that later layers attend to as well: under a word or number a tensor, or some."""
    return type(value) is UserDict and all(map(_are_tensors, value.data.values()))


def _are_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        type(value) in (tuple, list) and all(isinstance(v, Tensor) for v in value)
    )


def plain_cache_layers(cache: Any, own: Collection[int]) -> list[Any] | None:
    """The layers of a cache at these places, whose `update` does nothing but keep keys and values
    on their device, or None if one is of another kind. There may be fewer than places: a cache
    adds layers."""
    module = sys.modules.get(CACHES)
    if module is None or type(cache) not in (module.DynamicCache, module.StaticCache):
        return None
    if cache.offloading or "update" in vars(cache):
        return None
    kinds = (
        *(module.DynamicLayer, module.DynamicSlidingWindowLayer),
        *(module.StaticLayer, module.StaticSlidingWindowLayer),
    )
    count = len(cache.layers)
    layers = [cache.layers[i] for i in own if 0 <= i < count]
    if not all(type(layer) in kinds and "update" not in vars(layer) for layer in layers):
        return None
    added = cache.layer_class_to_replicate if len(layers) < len(own) else None
    if added is not None and added not in kinds:
        return None
    # somebody may have put other functions into the classes
    found = [type(cache).update]
    used: set[Any] = {added, *map(type, layers)} - {None}
    for kind in used:
        found += [kind.update, kind.lazy_initialization]
    own_code = all(getattr(f, "__globals__", None) is vars(module) for f in found)
    return layers if own_code else None


# methods by which layers of a cache are written to: keys and values, and states of other kinds
CACHE_UPDATES = ("update", "update_conv_state", "update_recurrent_state", "update_indexer")


def refuse_update(*args: Any, **kwargs: Any) -> Any:
    """In the place of CACHE_UPDATES of the layers of a cache that a block must not write to."""
    raise RuntimeError("it writes to another layer of its cache than its own")


def writes_in_place(layer: Any) -> bool:
    """Whether the `update` of a cache's layer writes to its tensors, rather than making others."""
    return isinstance(layer, sys.modules[CACHES].StaticLayer)


# the method by which transformers' layers find their attention function
GET_ATTENTION = "get_interface"


def attention_interface() -> Any:
    """The class of the tables in which transformers' layers find their attention function, or None
    before its import."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)


def static_cache_layers(cache: Any) -> list[Any] | None:
    """The layers of a cache whose tensors have a fixed size, or None if it is another kind. Each
    has `keys`, `values` and `cumulative_length`, tensors that its `update` writes to in place, and
    `is_initialized`, whether it has them yet."""
    module = sys.modules[CACHES]
    if type(cache) is not module.StaticCache or getattr(cache, "offloading", False):
        return None
    kinds = (module.StaticLayer, module.StaticSlidingWindowLayer)
    return list(cache.layers) if all(type(layer) in kinds for layer in cache.layers) else None


def static_cache_layer(cache: Any, index: int) -> Any:
    """The layer of a static cache that has its tensors already, is no sliding window, and is
    written to by the `update` of its class and of the cache's class alone; None if it is another
    kind of layer."""
    module = sys.modules.get(CACHES)
    if module is None or type(cache) is not module.StaticCache or cache.offloading:
        return None
    if "update" in vars(cache) or not 0 <= index < len(cache.layers):
        return None
    layer = cache.layers[index]
    if type(layer) is not module.StaticLayer or "update" in vars(layer):
        return None
    return layer if layer.is_initialized else None


# the class by which transformers' `generate` reads whether it has ended, one token late
DEFERRED_STOP_CHECK = "DeferredStopCheck"


def generation_module() -> Any:
    """transformers' module of `generate`, or None if it was not imported."""
    return sys.modules.get("transformers.generation.utils")


def own_causal_lm_loss(module: nn.Module) -> Any:
    """transformers' loss of causal language models if it is that of a module and nobody has set
    another one, else None."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or OWN_LOSS in vars(module) or not hasattr(type(module), "loss_function"):
        return None
    own = losses.ForCausalLMLoss
    is_it = getattr(module, "loss_type", None) == "ForCausalLM" and module.loss_function is own
    return own if is_it else None


def keep_from_compiling(model: nn.Module) -> None:
    """Let `generate` call the model itself: with a static cache it would compile it."""
    if hasattr(type(model), "_valid_auto_compile_criteria"):
        model.__dict__["_valid_auto_compile_criteria"] = _never


def let_compile(model: nn.Module) -> None:
    """Undo `keep_from_compiling`."""
    if model.__dict__.get("_valid_auto_compile_criteria") is _never:
        del model.__dict__["_valid_auto_compile_criteria"]


def _never(*args: Any, **kwargs: Any) -> bool:
    return False
