"""What real config.json files say, those that leave half of it to their class included."""

from __future__ import annotations

from typing import Any

import pytest

from fp8fleet.architecture import FULL, LINEAR, SLIDING, LayerGroup, read_architecture

# deepseek-ai/DeepSeek-V3
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# google/gemma-3-4b-it: heads, context and RoPE bases are left to Gemma3TextConfig
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}

# google/gemma-4-31b-it, as transformers 5 writes it
GEMMA_4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True,
        "dtype": "bfloat16",
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "vocab_size": 262144,
    },
}

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_gemma_4_has_two_kinds_of_layers_with_their_own_heads_and_rope() -> None:
    found = read_architecture(GEMMA_4_31B)
    assert found.groups == (
        LayerGroup(SLIDING, 50, 16, 256, 1024, {"rope_type": "default", "rope_theta": 1e4}),
        LayerGroup(
            FULL,
            10,
            4,
            512,
            None,
            {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        ),
    )
    assert (found.layers, found.heads, found.context) == (60, 32, 262144)
    assert (found.hidden_size, found.intermediate_size, found.vocabulary) == (5376, 21504, 262144)
    assert (found.name, found.dtype) == ("Gemma4ForConditionalGeneration", "bfloat16")


def test_gemma_4_without_shared_keys_has_the_same_heads_in_all_layers() -> None:
    text = {**GEMMA_4_31B["text_config"], "attention_k_eq_v": False}
    found = read_architecture({**GEMMA_4_31B, "text_config": text})
    assert [(g.kv_heads, g.head_dim) for g in found.groups] == [(16, 256), (16, 512)]


def test_the_differences_of_layers_are_read_from_the_newer_spelling_too() -> None:
    text = dict(GEMMA_4_31B["text_config"])
    del text["global_head_dim"], text["num_global_key_value_heads"]
    text["per_layer_config"] = {
        str(n): {"head_dim": 512, "num_key_value_heads": 4} for n in range(5, 60, 6)
    }
    found = read_architecture({**GEMMA_4_31B, "text_config": text})
    assert found.groups == read_architecture(GEMMA_4_31B).groups


def test_what_gemma_3_leaves_out_comes_from_its_class() -> None:
    found = read_architecture(GEMMA_3_4B)
    assert found.groups == (
        LayerGroup(SLIDING, 29, 4, 256, 1024, {"rope_type": "default", "rope_theta": 1e4}),
        LayerGroup(
            FULL, 5, 4, 256, None, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
        ),
    )
    assert (found.heads, found.context, found.dtype) == (8, 131072, "bfloat16")


def test_deepseek_caches_one_latent_vector() -> None:
    found = read_architecture(DEEPSEEK_V3)
    (group,) = found.groups
    assert found.latent_dim == 576
    assert (group.type, group.count, group.head_dim) == (FULL, 61, 192)
    assert group.rope["rope_type"] == "yarn"
    assert group.rope["rope_theta"] == 10000
    assert (found.experts, found.context) == (256, 163840)


def test_llama_3s_factor_is_in_its_context_already() -> None:
    found = read_architecture(LLAMA_3_1_8B)
    (group,) = found.groups
    assert (group.kv_heads, group.head_dim, found.context) == (8, 128, 131072)
    assert (group.rope["rope_type"], group.rope["rope_theta"]) == ("llama3", 500000.0)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [({"type": "linear", "factor": 2.0}, 262144), ({"type": "yarn", "factor": 4.0}, 131072)],
)
def test_linear_scaling_lengthens_the_context_and_yarn_is_in_it(
    scaling: dict[str, Any], context: int
) -> None:
    assert read_architecture({**LLAMA_3_1_8B, "rope_scaling": scaling}).context == context


def test_linear_attention_keeps_no_keys() -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
    }
    groups = read_architecture(config).groups
    assert [(g.type, g.count, g.kv_heads) for g in groups] == [(LINEAR, 36, None), (FULL, 12, 2)]


@pytest.mark.parametrize(
    ("changes", "kind", "window"),
    [
        ({"sliding_window": 4096}, SLIDING, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, FULL, None),
        ({"sliding_window": None}, FULL, None),
    ],
)
def test_a_window_slides_unless_it_is_switched_off(
    changes: dict[str, Any], kind: str, window: int | None
) -> None:
    (group,) = read_architecture({**LLAMA_3_1_8B, **changes}).groups
    assert (group.type, group.window) == (kind, window)


def test_an_empty_config_says_nothing() -> None:
    found = read_architecture({})
    assert (found.name, found.layers, found.heads, found.context) == (None, None, None, None)
    assert found.groups == ()
