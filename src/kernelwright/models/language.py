"""Presets of transformers' language models. Inputs are those of a prefill without a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .preset import Draw, Preset, Sizes

SIZES = {"batch": 1, "tokens": 4096}
TINY_SIZES = {"batch": 1, "tokens": 16}
WHAT = "4096 tokens"
DEPTH = ("num_hidden_layers",)
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
    what=WHAT,
    depth=DEPTH,
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
    what=WHAT,
    depth=DEPTH,
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
    what=WHAT,
    depth=DEPTH,
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
    what=WHAT,
    depth=DEPTH,
)


def _first_of_an_answer(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """As `generate` begins: of all tokens only the last one's logits are wanted."""
    return {**_prefill(draw, config, sizes), "logits_to_keep": 1}


# of six layers five look at a window
GEMMA_PERIOD = ["sliding_attention"] * 5 + ["full_attention"]


def _whole_periods(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    count = math.ceil(layers / len(GEMMA_PERIOD)) * len(GEMMA_PERIOD)
    kinds = config["layer_types"][:count]
    return {"num_hidden_layers": len(kinds), "layer_types": kinds}


GEMMA_3_12B = Preset(
    name="gemma-3-12b",
    title="Gemma 3 12B",
    library="transformers",
    class_name="Gemma3ForCausalLM",
    config={
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": _rope(10000.0),
        },
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": GEMMA_PERIOD * 8,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    tiny_config={
        **TINY,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,
        "sliding_window": 8,
    },
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_first_of_an_answer,
    what="4096 tokens, five of six layers with a window of 1024",
    depth=("num_hidden_layers", "layer_types"),
    shallow=_whole_periods,
)

# these numbers give the 30.7 billion parameters that Google names
GEMMA_4_31B = Preset(
    name="gemma-4-31b",
    title="Gemma 4 31B",
    library="transformers",
    class_name="Gemma4ForCausalLM",
    config={
        "vocab_size": 262144,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "layer_types": GEMMA_PERIOD * 10,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    tiny_config={
        **TINY,
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
    },
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_first_of_an_answer,
    what="4096 tokens, five of six layers with a window of 1024",
    depth=("num_hidden_layers", "layer_types"),
    shallow=_whole_periods,
)

# a head is as wide as the model over its heads
PHI_TINY = {name: value for name, value in TINY.items() if name != "head_dim"} | {"pad_token_id": 0}


def _phi_rope(theta: float) -> dict[str, Any]:
    return {**_rope(theta), "partial_rotary_factor": 1.0}


PHI_4 = Preset(
    name="phi-4",
    title="Phi-4",
    library="transformers",
    class_name="Phi3ForCausalLM",
    config={
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _phi_rope(250000.0),
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": 100349,
        "bos_token_id": 100257,
        "eos_token_id": 100265,
    },
    tiny_config=PHI_TINY,
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_first_of_an_answer,
    what=WHAT,
    depth=DEPTH,
)

PHI_3_MINI = Preset(
    name="phi-3-mini",
    title="Phi-3 mini 4k",
    library="transformers",
    class_name="Phi3ForCausalLM",
    config={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _phi_rope(10000.0),
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "pad_token_id": 32000,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    tiny_config={
        **PHI_TINY,
        "hidden_size": 192,
        "num_attention_heads": 2,  # of 96
        "num_key_value_heads": 2,
        "sliding_window": 8,
    },
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_first_of_an_answer,
    what="4096 tokens, heads of 96, a window of 2047",
    depth=DEPTH,
)

GLM_4_9B = Preset(
    name="glm-4-9b",
    title="GLM-4 9B 0414",
    library="transformers",
    class_name="Glm4ForCausalLM",
    config={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_rope(10000.0), "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "tie_word_embeddings": False,
        "pad_token_id": 151329,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    },
    tiny_config={**TINY, "pad_token_id": 0},
    sizes=SIZES,
    tiny_sizes=TINY_SIZES,
    make_inputs=_first_of_an_answer,
    what="4096 tokens, 32 heads on 2, half of each rotated",
    depth=DEPTH,
)

PRESETS = (
    LLAMA_3_8B,
    MISTRAL_7B,
    QWEN3_8B,
    FALCON_7B,
    GEMMA_3_12B,
    GEMMA_4_31B,
    PHI_4,
    PHI_3_MINI,
    GLM_4_9B,
)
