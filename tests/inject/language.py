"""Tiny language models of transformers, and token inputs for them."""

import torch
import transformers
from torch import nn

LAYERS = 2
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(family, dtype=torch.float32, **config):
    """A tiny model of a family of transformers, with random weights."""
    torch.manual_seed(0)
    named = next(n for n in (f"{family}TextConfig", f"{family}Config") if hasattr(transformers, n))
    made = getattr(transformers, named)(**{**SIZES, **config})
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return nn.Module.to(model, dtype)


def words(batch=2, tokens=7, **more):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (batch, tokens), generator=generator)
    return {"input_ids": ids, "use_cache": False, **more}
