"""A model from a preset's name, a folder, or the Hub."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .catalog import build, presets, suggestion
from .weights import empty_model

PIPELINE, MODEL = "model_index.json", "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    source: str | Path,
    *,
    tiny: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    allow_pickle: bool = False,
) -> Any:
    """A model or a diffusers pipeline in eval mode.

    `source` is the name of a preset, a folder that `save_pretrained` wrote, or the id of a
    repository on the Hub, "owner/name". On the "meta" device only configs are read. Code that comes
    with a model is never run. Weights are read from safetensors; from pickles (.bin) only with
    `allow_pickle`, if there are no safetensors, and then tensors only.

    >>> load("qwen3-8b", device="meta").config.num_hidden_layers
    36
    """
    source = str(source)
    if source in presets():
        return build(source, tiny=tiny, dtype=dtype, device=device)
    if tiny:
        raise ValueError(f"{source!r}: only presets have a tiny size; {suggestion(source)}")
    on_meta = torch.device(device).type == "meta"
    if (index := _read(source, PIPELINE)) is not None:
        if on_meta:
            return _empty_pipeline(source, index, dtype)
        from diffusers import DiffusionPipeline

        return _pretrained(DiffusionPipeline, "diffusers", source, dtype, allow_pickle).to(device)
    if (config := _read(source, MODEL)) is None:
        raise _nothing(source, f"it has no {PIPELINE} and no {MODEL}, or cannot be reached")
    library, name = _class_of(source, config)
    cls = _find(source, library, name)
    if on_meta:
        return _empty(cls, source, None, dtype)
    return _pretrained(cls, library, source, dtype, allow_pickle).to(device).eval()


def _pretrained(cls: Any, library: str, source: str, dtype: torch.dtype, allow_pickle: bool) -> Any:
    """`from_pretrained` with the allowed weight files: by default both libraries read pickles if
    there is nothing else."""
    how = _cast(library, dtype)
    if allow_pickle:
        # diffusers has no such argument, and always loads weights only
        safely = {"weights_only": True} if library == "transformers" else {}
        return cls.from_pretrained(source, **safely, **how)
    try:
        return cls.from_pretrained(source, use_safetensors=True, **how)
    except OSError as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{source}: its weights cannot be read from safetensors ({why}). Pickled weights "
            f"are read only on request: load(..., allow_pickle=True) if you trust their source; "
            f"then save_pretrained writes them as safetensors"
        ) from error


def _read(source: str, file: str) -> dict[str, Any] | None:
    """A JSON file of a folder or of a repository on the Hub; None if it has no such file."""
    if Path(source).is_dir():
        path = Path(source) / file
        return _parsed(path) if path.is_file() else None
    if not HUB_ID.fullmatch(source):
        raise _nothing(source, 'an id on the Hub has the form "owner/name"')
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return _parsed(Path(huggingface_hub.hf_hub_download(source, file)))
    except EntryNotFoundError:  # on the Hub, or, without a network, in the cache
        return None
    except OSError as error:
        raise _nothing(source, str(error)) from error


def _parsed(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError that names the file if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path}: not valid JSON ({error}); download or save it again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: holds a {type(content).__name__}, expected an object of settings"
        )
    return content


def _nothing(source: str, why: str) -> ValueError:
    return ValueError(
        f"{source!r} is not a preset, a folder with a model or a model on the Hub ({why}); "
        f"{suggestion(source)}"
    )


def _class_of(source: str, config: dict[str, Any]) -> tuple[str, str]:
    """The library and the class that a config.json names."""
    if "_class_name" in config:
        return "diffusers", config["_class_name"]
    if config.get("architectures"):
        return "transformers", config["architectures"][0]
    if "model_type" in config:
        return "transformers", "AutoModel"
    raise ValueError(f"{source}: {MODEL} names no class of diffusers or transformers")


def _find(source: str, library: str, name: str) -> Any:
    module = importlib.import_module(library)
    if not hasattr(module, name):
        raise ValueError(f"{source}: the installed {library} has no {name}")
    return getattr(module, name)


def _cast(library: str, dtype: torch.dtype) -> dict[str, Any]:
    """The dtype argument of `from_pretrained`; diffusers before 0.42 calls it torch_dtype."""
    if library == "diffusers":
        import diffusers

        major, minor = map(int, diffusers.__version__.split(".")[:2])
        if (major, minor) < (0, 42):
            return {"torch_dtype": dtype}
    return {"dtype": dtype}


def _empty(cls: Any, source: str, subfolder: str | None, dtype: torch.dtype) -> nn.Module:
    """A model on the meta device, from its config."""
    try:
        return _from_config(cls, source, {"subfolder": subfolder} if subfolder else {}, dtype)
    except OSError:  # the library names the file
        raise
    except Exception as error:  # whatever a value of a wrong kind leads to
        file = "/".join(part for part in (source, subfolder, MODEL) if part)
        why = " ".join(str(error).split())
        raise ValueError(f"{file}: no {cls.__name__} can be built from it ({why})") from error


def _from_config(cls: Any, source: str, place: dict[str, str], dtype: torch.dtype) -> nn.Module:
    if hasattr(cls, "load_config"):  # diffusers
        config = cls.load_config(source, **place)
        return empty_model(lambda: cls.from_config(config), dtype)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, **place)
    construct = cls.from_config if cls.__name__ == "AutoModel" else cls._from_config
    return empty_model(lambda: construct(config, dtype=dtype), dtype)


def _empty_pipeline(source: str, index: dict[str, Any], dtype: torch.dtype) -> Any:
    """A pipeline whose models are on the meta device; tokenizers and schedulers are loaded."""
    parts: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(value, list):
            parts[name] = value
            continue
        if len(value) != 2:
            raise ValueError(f"{source}/{PIPELINE}: {name} is {value}, expected library and class")
        library, class_name = value
        if library is None:
            parts[name] = None
            continue
        known = library in ("diffusers", "transformers")
        cls = _find(source, library if known else f"diffusers.pipelines.{library}", class_name)
        if issubclass(cls, nn.Module):
            parts[name] = _empty(cls, source, name, dtype)
        else:
            parts[name] = cls.from_pretrained(source, subfolder=name)
    return _find(source, "diffusers", index["_class_name"])(**parts)
