"""Presets of transformers' language models. Inputs are those of a prefill without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .preset import Draw, Preset, Sizes

SIZES = {"batch": 1, "tokens": 4096}
TINY_SIZES = {"batch": 1, "tokens": 16}
# names that all of them share, except Falcon
TINY = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _prefill(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    ids = draw.integers(config["vocab_size"], sizes["batch"], sizes["tokens"])
    return {"input_ids": ids, "use_cache": False}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


LLAMA_3_8B = Preset(
    name="llama-3-8b",
    title="Llama 3 8B",
    library="transformers",
    class_name="LlamaForCausalLM",
    config={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(500000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    tiny_config=TINY,
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_prefill,
)

# version 0.1, the one with a sliding window
MISTRAL_7B = Preset(
    name="mistral-7b",
    title="Mistral 7B",
    library="transformers",
    class_name="MistralForCausalLM",
    config={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(10000.0),
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tiny_config=TINY,
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_prefill,
)

QWEN3_8B = Preset(
    name="qwen3-8b",
    title="Qwen3 8B",
    library="transformers",
    class_name="Qwen3ForCausalLM",
    config={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1000000.0),
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    tiny_config={**TINY, "max_window_layers": 2},
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_prefill,
)

FALCON_7B = Preset(
    name="falcon-7b",
    title="Falcon 7B",
    library="transformers",
    class_name="FalconForCausalLM",
    config={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "ffn_hidden_size": 4 * 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "bias": False,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(10000.0),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    tiny_config={
        "vocab_size": 256,
        "hidden_size": 256,
        "ffn_hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_prefill,
)

PRESETS = (LLAMA_3_8B, MISTRAL_7B, QWEN3_8B, FALCON_7B)
