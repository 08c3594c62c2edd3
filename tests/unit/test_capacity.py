"""What a server's memory holds: weights a GPU, keys and values a token, and what is left."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import eight_b
import pytest
from checkpoints import linear
from fleets import DIGEST, Site, fp8fleet, refusal

from fp8fleet import catalog
from fp8fleet.architecture import config_problems, longest_context, read_architecture
from fp8fleet.capacity import Capacity, Settings, estimate
from fp8fleet.headers import headers_text
from fp8fleet.kv_cache import CacheLayout, cache_layout
from fp8fleet.plan import CapacityPlan
from fp8fleet.planner.capacity import settings_of
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.weights import layers_of_ranks, weights_per_gpu

GIB = 1 << 30
H200 = catalog.accelerators()["h200-141g"].engine_bytes or 0
EIGHT_B = {layout: eight_b.checkpoint(layout) for layout in ("none", "ct-block", "deepseek")}
DEFAULTS = Settings(H200, 0.92, 1024, 8192)


def known(checkpoint: StoredCheckpoint, settings: Settings = DEFAULTS) -> Capacity:
    capacity = estimate(checkpoint, settings)
    assert capacity is not None
    return capacity


def settings(**changes: Any) -> Settings:
    return replace(DEFAULTS, **changes)


# --- against what was measured ------------------------------------------------------------------

# vLLM 0.23.0, H200, gpu-memory-utilization 0.92: GPU KV cache size in the log
MEASURED = [
    ("ct-block", settings(), 962_560),
    ("ct-block", settings(kv_cache_dtype="fp8"), 1_925_136),
    ("none", settings(), 922_016),
    ("none", settings(kv_cache_dtype="fp8"), 1_844_032),
    ("ct-block", settings(max_num_batched_tokens=2048), 962_944),
    ("ct-block", settings(max_num_batched_tokens=16384), 962_064),
    ("ct-block", settings(max_num_seqs=128), 971_264),
    ("ct-block", settings(max_num_seqs=64, max_num_batched_tokens=16384), 966_864),
    ("ct-block", settings(max_num_seqs=64, max_num_batched_tokens=2048), 972_896),
    ("ct-block", settings(max_model_len=32768), 962_576),
    ("none", settings(max_num_seqs=64, max_num_batched_tokens=16384), 914_624),
    ("none", settings(max_num_seqs=64, max_num_batched_tokens=2048), 920_912),
    ("none", settings(max_num_seqs=128), 920_144),
    ("ct-block", settings(tensor_parallel=2), 1_991_760),
]


@pytest.mark.parametrize(("layout", "options", "tokens"), MEASURED)
def test_the_estimate_is_within_the_bounds_that_the_docs_state(
    layout: str, options: Settings, tokens: int
) -> None:
    capacity = replace(known(EIGHT_B[layout], options), measured_kv_tokens=tokens)
    assert capacity.error is not None
    # Unquantized models with many sequences get more than is estimated, no model much less.
    assert -0.015 < capacity.error < 0.001


def test_the_estimate_of_a_quantized_model_is_nearly_exact() -> None:
    errors = [
        known(EIGHT_B["ct-block"], o).kv_tokens / n - 1 for q, o, n in MEASURED if q != "none"
    ]
    assert len(errors) == 9
    assert max(map(abs, errors)) < 0.0005


# --- the sum ------------------------------------------------------------------------------------


def test_the_parts_add_up_and_say_where_they_are_from() -> None:
    capacity = known(EIGHT_B["ct-block"])
    assert sum(part.bytes for part in capacity.parts) == capacity.kv_bytes
    assert [(part.name, part.how) for part in capacity.parts] == [
        ("0.92 of 139.80 GiB", "catalogue"),
        ("weights", "headers"),
        ("CUDA context", "estimate"),
        ("activations", "estimate"),
        ("CUDA graphs", "estimate"),
    ]


def test_tokens_come_in_whole_blocks() -> None:
    assert known(EIGHT_B["none"]).kv_tokens % 16 == 0


def test_sequences_and_the_largest_context_follow_from_the_tokens() -> None:
    capacity = known(EIGHT_B["ct-block"])
    assert capacity.sequences(16384) == pytest.approx(capacity.kv_tokens / 16384, rel=1e-4)
    assert capacity.largest_context() == 131072
    assert capacity.fits


def test_the_largest_context_is_what_the_memory_holds_where_that_is_less() -> None:
    capacity = known(EIGHT_B["ct-block"], settings(memory_bytes=20 * GIB))
    assert capacity.largest_context() == capacity.kv_tokens < 131072
    assert not capacity.fits
    assert known(EIGHT_B["ct-block"], settings(memory_bytes=20 * GIB, max_model_len=16384)).fits


def test_what_was_measured_counts_in_place_of_the_estimate() -> None:
    estimated = known(EIGHT_B["ct-block"])
    capacity = replace(estimated, measured_kv_tokens=estimated.kv_tokens // 2)
    assert capacity.tokens == estimated.kv_tokens // 2
    assert capacity.error == pytest.approx(1)
    assert capacity.sequences(4096) == pytest.approx(estimated.sequences(4096) / 2, rel=1e-4)


def test_a_cache_of_a_set_size_is_that_size_whatever_is_left() -> None:
    capacity = known(EIGHT_B["none"], settings(memory_bytes=0, kv_cache_memory_bytes=20 * GIB))
    # as vLLM 0.23.0 logged it
    assert capacity.kv_tokens == 163_840
    assert [part.how for part in capacity.parts] == ["option"]


def test_eager_execution_leaves_the_graphs_memory_to_the_cache() -> None:
    eager = known(EIGHT_B["ct-block"], settings(enforce_eager=True))
    assert eager.kv_bytes - known(EIGHT_B["ct-block"]).kv_bytes == 512 << 20


def test_memory_that_the_weights_exceed_holds_nothing() -> None:
    capacity = known(EIGHT_B["none"], settings(memory_bytes=8 * GIB))
    assert capacity.kv_bytes < 0
    assert (capacity.kv_tokens, capacity.sequences(16), capacity.largest_context()) == (0, 0, 0)
    assert not capacity.fits


@pytest.mark.parametrize(
    "missing", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"]
)
def test_nothing_is_claimed_where_config_json_does_not_tell(missing: str) -> None:
    left_out = {"num_key_value_heads", "head_dim"} if missing == "num_attention_heads" else set()
    values = {k: v for k, v in eight_b.config().items() if k not in {missing, *left_out}}
    assert estimate(eight_b.of(values, eight_b.tensors()), DEFAULTS) is None


def test_nothing_is_claimed_of_an_unknown_kv_dtype() -> None:
    assert estimate(EIGHT_B["none"], settings(kv_cache_dtype="nvfp4")) is None


# --- weights ------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}


def small(layout: str = "none", **changes: Any) -> StoredCheckpoint:
    return eight_b.checkpoint(layout, **{**SMALL, **changes})


def test_one_gpu_holds_all_that_the_headers_have() -> None:
    whole = sum(tensor.end - tensor.begin for tensor in EIGHT_B["ct-block"].tensors.values())
    assert weights_per_gpu(EIGHT_B["ct-block"]) == whole
    # vLLM 0.23.0 logged 8.49 GiB
    assert whole / GIB == pytest.approx(8.49, rel=0.005)


def test_the_vocabulary_is_filled_up_to_a_multiple_of_64() -> None:
    whole = sum(tensor.end - tensor.begin for tensor in small().tensors.values())
    assert weights_per_gpu(small()) - whole == 2 * (1024 - 1000) * 512 * 2


@pytest.mark.parametrize("layout", ["none", "ct-block", "deepseek", "ct-channel", "int8"])
def test_two_gpus_halve_all_but_the_norms(layout: str) -> None:
    norms = 5 * 512 * 2
    # with four heads the keys of one GPU are whole blocks
    one, two = (weights_per_gpu(small(layout, num_key_value_heads=4), size) for size in (1, 2))
    halved = 2 * (two - norms)
    # Row scales of a layer that is divided by inputs are on both GPUs.
    scales = {"ct-channel": 2, "int8": 2}.get(layout, 0) * 2 * 512 * 2
    assert halved - scales == one - norms


def test_keys_and_values_are_repeated_on_more_gpus_than_heads() -> None:
    keys = 2 * 2 * (2 * 64) * 512 * 2
    four, eight = weights_per_gpu(small(), 4), weights_per_gpu(small(), 8)
    norms = 5 * 512 * 2
    # from 4 to 8 everything halves but the norms and what of the keys and values one head has
    assert four - norms - keys // 2 == 2 * (eight - norms - keys // 2)


def test_the_biases_of_layers_divided_by_inputs_are_on_every_gpu() -> None:
    biased = eight_b.tensors(**SMALL)
    biased["model.layers.0.self_attn.q_proj.bias"] = ("BF16", (512,))
    biased["model.layers.0.self_attn.o_proj.bias"] = ("BF16", (512,))
    more = weights_per_gpu(eight_b.of(eight_b.config(**SMALL), biased), 4) - weights_per_gpu(
        small(), 4
    )
    assert more == 2 * (512 // 4 + 512)


def test_experts_are_divided_and_routers_are_not() -> None:
    specs = eight_b.tensors(**SMALL)
    specs["model.layers.0.mlp.gate.weight"] = ("BF16", (8, 512))
    for expert in range(8):
        for name, shape in (("w1", (256, 512)), ("w2", (512, 256)), ("w3", (256, 512))):
            specs[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = ("BF16", shape)
    made = eight_b.of(eight_b.config(**SMALL), specs)
    more = weights_per_gpu(made, 4) - weights_per_gpu(small(), 4)
    assert more == 2 * (8 * 512 + 8 * 3 * 256 * 512 // 4)


def test_a_tied_embedding_is_loaded_once_even_if_the_shards_have_it_twice() -> None:
    specs = eight_b.tensors(**SMALL)
    tied = eight_b.of(eight_b.config(**SMALL, tie_word_embeddings=True), specs)
    assert weights_per_gpu(small()) - weights_per_gpu(tied) == 1024 * 512 * 2


def test_layers_of_a_draft_model_are_not_loaded() -> None:
    specs = eight_b.tensors(**{**SMALL, "num_hidden_layers": 3})
    assert weights_per_gpu(eight_b.of(eight_b.config(**SMALL), specs)) == weights_per_gpu(small())


def test_f32_weights_are_loaded_with_16_bits() -> None:
    specs = {n: ("F32", shape) for n, (_, shape) in eight_b.tensors(**SMALL).items()}
    assert weights_per_gpu(eight_b.of(eight_b.config(**SMALL), specs)) == weights_per_gpu(small())


def test_quantization_while_loading_halves_the_linear_layers_only() -> None:
    plain = 2 * 1024 * 512 * 2 + 5 * 512 * 2
    online = weights_per_gpu(small(), quantization="fp8_per_tensor")
    assert 2 * (online - plain) == weights_per_gpu(small()) - plain


def test_the_option_changes_nothing_of_a_quantized_checkpoint() -> None:
    online = weights_per_gpu(small("ct-block"), quantization="fp8_per_tensor")
    assert online == weights_per_gpu(small("ct-block"))


def test_a_pipeline_divides_the_layers_and_its_fullest_rank_counts() -> None:
    ends = 1024 * 512 * 2
    layers = weights_per_gpu(small()) - 2 * ends - 512 * 2
    # the last rank has the output layer and the last norm
    assert weights_per_gpu(small(), 1, 2) == layers // 2 + ends + 512 * 2


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline() -> None:
    specs = {n: s for n, s in eight_b.tensors(**SMALL).items() if n != "lm_head.weight"}
    tied = eight_b.of(eight_b.config(**SMALL, tie_word_embeddings=True), specs)
    assert weights_per_gpu(tied, 1, 2) == weights_per_gpu(small(), 1, 2)


@pytest.mark.parametrize(
    ("layers", "ranks", "expected"),
    [(32, 4, [8, 8, 8, 8]), (61, 2, [31, 30]), (30, 4, [7, 8, 8, 7]), (2, 4, [0, 1, 1, 0])],
)
def test_layers_that_are_left_over_go_before_the_last_rank(
    layers: int, ranks: int, expected: list[int]
) -> None:
    assert layers_of_ranks(layers, ranks) == expected


# --- keys and values ----------------------------------------------------------------------------


def layout_of(config: dict[str, Any], *ranks: int, dtype: str = "auto") -> CacheLayout:
    layout = cache_layout(read_architecture(config), dtype, 8192, *ranks)
    assert layout is not None
    return layout


def test_a_token_takes_keys_and_values_of_every_layer() -> None:
    assert layout_of(eight_b.CONFIG).bytes_per_token == 128 * 1024
    assert layout_of(eight_b.CONFIG, dtype="fp8").bytes_per_token == 64 * 1024


@pytest.mark.parametrize(("size", "kib"), [(2, 64), (4, 32), (8, 16), (16, 16)])
def test_heads_are_divided_until_every_gpu_has_one(size: int, kib: int) -> None:
    assert layout_of(eight_b.CONFIG, size).bytes_per_token == kib * 1024


def test_a_rank_of_a_pipeline_keeps_its_own_layers() -> None:
    assert layout_of(eight_b.CONFIG, 1, 4).bytes_per_token == 32 * 1024


GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 60,
    "hidden_size": 5376,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}


def test_layers_with_a_window_ask_for_it_and_for_what_is_in_flight() -> None:
    layout = layout_of(GEMMA)
    by_window = {layers.window: layers.bytes_per_token for layers in layout.layers}
    assert by_window == {1024: 50 * 2 * 16 * 256 * 2, None: 10 * 2 * 4 * 512 * 2}
    full = 100_000 * by_window[None]
    # in whole blocks of 16, and one more
    assert layout.admitted_bytes(100_000) - full == (1024 + 2 * 8192 + 16) * by_window[1024]
    assert layout.held_bytes(100_000) - full == (1024 + 16) * by_window[1024]
    assert not layout.uniform


def test_below_the_window_every_layer_keeps_every_token() -> None:
    layout = layout_of(GEMMA)
    sliding = next(layers for layers in layout.layers if layers.window)
    more = 16 * sliding.bytes_per_token
    assert layout.held_bytes(512) == 512 * layout.bytes_per_token + more


def test_a_sequence_is_admitted_beside_those_that_go_on() -> None:
    capacity = known(eight_b.of({**eight_b.CONFIG, "sliding_window": 1024}, eight_b.tensors()))
    layout, context = capacity.layout, 65536
    rest = capacity.kv_bytes - layout.admitted_bytes(context)
    assert capacity.sequences(context) == 1 + rest / layout.held_bytes(context)
    # vLLM's log counts every sequence as one that is being admitted
    assert capacity.kv_tokens < capacity.sequences(131072) * 131072


def test_latent_attention_keeps_its_numbers_once_on_every_gpu() -> None:
    deepseek = {**eight_b.CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert layout_of(deepseek).bytes_per_token == 32 * 576 * 2
    assert layout_of(deepseek, 8).bytes_per_token == 32 * 576 * 2


def test_layers_that_share_earlier_ones_keep_nothing() -> None:
    shared = {**eight_b.CONFIG, "num_kv_shared_layers": 12}
    assert layout_of(shared).bytes_per_token == 20 * 4096


def test_shared_layers_are_counted_by_their_types() -> None:
    shared = {**GEMMA, "num_kv_shared_layers": 6}
    by_window = {layers.window: layers.bytes_per_token for layers in layout_of(shared).layers}
    assert by_window == {1024: 45 * 2 * 16 * 256 * 2, None: 9 * 2 * 4 * 512 * 2}


def test_the_state_of_linear_layers_is_stated_as_unknown() -> None:
    values = {**eight_b.CONFIG, "full_attention_interval": 4}
    assert layout_of(values).bytes_per_token == 8 * 4096
    capacity = known(eight_b.of(values, eight_b.tensors()))
    last = capacity.parts[-1]
    assert (last.name, last.bytes, last.how) == ("state of 24 x linear_attention", 0, "unknown")


# --- the plan -----------------------------------------------------------------------------------


@pytest.fixture
def served(site: Site) -> Site:
    """A site whose model is the FP8-block 8B, on H200."""
    store(site, "ct-block")
    site.serving["accelerator"] = "h200-141g"
    return site


def store(site: Site, layout: str, **changes: Any) -> None:
    specs = eight_b.tensors(layout, **changes)
    headers = headers_text({"model.safetensors": eight_b.header(specs)})
    site.file("models/tiny/headers.json", headers)
    site.file("models/tiny/config.json", json.dumps(eight_b.config(layout, **changes)))


def instance(
    site: Site,
    devices: int = 1,
    size: int = 1,
    pipeline: int = 1,
    group: str | None = None,
    **options: Any,
) -> None:
    site.serving["instances"] = [
        {
            "name": "main",
            "port": 8000,
            "devices": list(range(devices)),
            "tensor_parallel_size": size,
            "pipeline_parallel_size": pipeline,
            "group": group,
            "options": {key.replace("_", "-"): value for key, value in options.items()},
        }
    ]


def planned(site: Site) -> CapacityPlan:
    capacity = site.host_plan().instances[0].capacity
    assert capacity is not None
    return capacity


def test_a_server_is_planned_with_vllms_defaults(served: Site) -> None:
    capacity = planned(served)
    assert capacity.kv_tokens == known(EIGHT_B["ct-block"]).kv_tokens
    assert (capacity.context, capacity.largest_context) == (131072, 131072)
    assert capacity.sequences == pytest.approx(7.3, abs=0.1)


@pytest.mark.parametrize(
    ("accelerator", "release", "expected"),
    [
        ("h100-80g", "0.33.0", (8192, 1024, 0.92)),
        ("a100-80g", "0.33.0", (2048, 256, 0.92)),
        ("l40s-48g", "0.19.1", (2048, 256, 0.9)),
        ("b200-180g", "0.33.0", (16384, 1024, 0.92)),
    ],
)
def test_defaults_are_those_of_accelerator_and_release(
    accelerator: str, release: str, expected: tuple[int, int, float]
) -> None:
    known_one = catalog.accelerators()[accelerator]
    share = catalog.releases()[release].gpu_memory_utilization
    assert (known_one.batched_tokens, known_one.sequences, share) == expected


def test_every_option_that_counts_is_taken_from_the_server(served: Site) -> None:
    instance(
        served,
        2,
        2,
        gpu_memory_utilization=0.5,
        max_num_seqs=64,
        max_num_batched_tokens="2k",
        max_model_len="32K",
        kv_cache_dtype="fp8",
        enforce_eager=True,
    )
    asked = Settings(H200, 0.5, 64, 2000, "fp8", 32768, 2, 1, True)
    assert planned(served).kv_tokens == known(EIGHT_B["ct-block"], asked).kv_tokens
    assert planned(served).context == 32768


@pytest.mark.parametrize("length", ["auto", -1])
def test_an_automatic_context_is_the_largest_that_fits(served: Site, length: Any) -> None:
    instance(served, gpu_memory_utilization=0.1, max_model_len=length)
    capacity = planned(served)
    assert capacity.context == capacity.largest_context == capacity.kv_tokens < 131072


def test_without_stored_headers_the_plan_works_and_says_that_it_does_not_know(site: Site) -> None:
    (server,) = site.host_plan().instances
    assert server.capacity is None
    why = "models/ has no config.json and headers.json of the model"
    assert server.capacity_unknown == why
    ran = fp8fleet("plan", site.inventory(), cwd=site.root)
    assert f"KV cache         unknown: {why}\n" in ran.out


@pytest.mark.parametrize("option", ["cpu-offload-gb", "speculative-config", "enable-lora"])
def test_nothing_is_claimed_where_an_option_uses_memory_otherwise(
    served: Site, option: str
) -> None:
    changed: dict[str, Any] = {
        option: {
            "cpu-offload-gb": 4,
            "enable-lora": True,
            "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        }[option]
    }
    instance(served, **changed)
    (server,) = served.host_plan().instances
    assert server.capacity is None
    assert server.capacity_unknown == f"{option} uses memory in other ways"


def test_nothing_is_claimed_of_a_cpu_but_a_cache_of_a_set_size(site: Site) -> None:
    store(site, "none")
    site.serving |= {"accelerator": "cpu"}
    instance(site, 0)
    (server,) = site.host_plan().instances
    assert (server.capacity, server.capacity_unknown) == (None, None)
    instance(site, 0, kv_cache_memory_bytes=20 * GIB)
    assert planned(site).kv_tokens == 163_840


def test_the_plan_shows_the_sum(served: Site) -> None:
    path = served.inventory()
    ran = fp8fleet("plan", path, cwd=served.root)
    assert ran.code == 0, ran.err
    rows = dict(re.findall(r"^    (KV cache|a device) +(.*)$", ran.out, flags=re.M))
    assert rows == {
        "KV cache": "about 962,768 tokens (estimate), 7.3 sequences of 131,072;"
        " the largest context is 131,072",
        "a device": "117.53 GiB = 128.62 GiB (0.92 of 139.80 GiB, catalogue)"
        " - 8.46 GiB weights (headers) - 240 MiB CUDA context (estimate)"
        " - 1.90 GiB activations (estimate) - 512 MiB CUDA graphs (estimate)",
    }
    (server,) = json.loads(fp8fleet("plan", path, "--json", cwd=served.root).out)["hosts"]["gpu-1"][
        "instances"
    ]
    assert server["capacity"]["kv_tokens"] == 962_768
    assert server["capacity"]["parts"][1]["how"] == "headers"


# --- what cannot be -----------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_what_would_do(site: Site) -> None:
    store(site, "none")
    site.serving["accelerator"] = "l40s-48g"
    instance(site, 4, gpu_memory_utilization=0.5)
    message = site.refusal()
    assert "instances: main: does not fit: 0.5 of 44.52 GiB (22.3 GiB a device)" in message
    assert "less weights 15.0 and CUDA context 0.2 and activations 1.0" in message
    assert "one sequence of 131,072 tokens needs 16.0" in message
    assert "set max-model-len to 45520 or less" in message
    assert "or raise gpu-memory-utilization, such as to the default, 0.92" in message
    assert message.endswith("or set tensor_parallel_size to 2 or 4 or 8, with as many devices")


def test_sizes_beyond_the_hosts_devices_are_not_named(site: Site) -> None:
    store(site, "none")
    site.serving |= {"accelerator": "l40s-48g", "device_count": 4}
    instance(site, 4, gpu_memory_utilization=0.5)
    message = site.refusal()
    assert message.endswith("set tensor_parallel_size to 2 or 4, with as many devices")
    site.serving |= {"device_count": 1}
    instance(site, 1, gpu_memory_utilization=0.3)
    assert "share the server among more hosts (group: docs/servers.md)" in site.refusal()
    assert "tensor_parallel_size 4 would do, and there are 1 devices" in site.refusal()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000}, "lower max-num-seqs, such"),
        ({"max_num_batched_tokens": 2_000_000}, "lower max-num-batched-tokens, such as to"),
        (
            {"max_num_seqs": 100_000, "max_num_batched_tokens": 2_000_000},
            "lower max-num-seqs and max-num-batched-tokens, such as to vLLM's default, 1024 and",
        ),
    ],
)
def test_an_option_that_takes_the_room_is_named(
    served: Site, options: dict[str, Any], remedy: str
) -> None:
    instance(served, **options)
    message = served.refusal()
    assert remedy in message
    assert "no tensor_parallel_size would do" not in message


# --- what vLLM compares at its start ------------------------------------------------------------


def test_a_context_above_the_models_is_refused_with_the_models(served: Site) -> None:
    instance(served, max_model_len=200_000)
    message = served.refusal()
    assert "max-model-len 200000 is above the model's context of 131072 tokens" in message
    assert "set 131072 or less" in message


def test_a_context_above_the_models_is_taken_where_the_operator_says_so(served: Site) -> None:
    instance(served, max_model_len=200_000)
    served.serving["engine_environment"] = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert planned(served).context == 200_000
    served.serving["engine_environment"] = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "0"}
    assert "is above the model's context" in served.refusal()
    del served.serving["engine_environment"]
    rope = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 2.0}}
    instance(served, max_model_len=200_000, hf_overrides=rope)
    assert served.host_plan().instances[0].options["max-model-len"] == 200_000


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 131072),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_longest_context_is_what_some_release_takes(
    changes: dict[str, Any], longest: int | None
) -> None:
    assert longest_context({**eight_b.CONFIG, **changes}) == longest


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"max_num_seqs": 1024, "max_num_batched_tokens": 512},
            "max-num-seqs 1024 is above max-num-batched-tokens, 512",
        ),
        (
            {"max_num_seqs": 10_000},
            "max-num-seqs 10000 is above max-num-batched-tokens, by default 8192 there",
        ),
        (
            {"max_num_batched_tokens": 8192, "no_enable_chunked_prefill": True},
            "max-num-batched-tokens 8192 is below the longest sequence, 131072 tokens",
        ),
    ],
)
def test_fewer_tokens_a_step_than_vllm_wants_are_refused(
    served: Site, options: dict[str, Any], told: str
) -> None:
    instance(served, **options)
    message = served.refusal()
    assert told in message
    assert "raise max-num-batched-tokens" in message


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_seqs": 512, "max_num_batched_tokens": 512},
        {"max_num_seqs": 10_000, "performance_mode": "throughput"},
    ],
)
def test_sequences_that_are_not_set_follow_the_tokens_a_step(
    served: Site, options: dict[str, Any]
) -> None:
    instance(served, max_model_len=8192, **options)
    assert planned(served).combination.max_num_seqs == options.get("max_num_seqs", 512)


def test_a_model_whose_weights_exceed_the_memory_names_the_sizes(site: Site) -> None:
    store(site, "none")
    site.serving["accelerator"] = "l40s-48g"
    instance(site, 1, gpu_memory_utilization=0.3)
    message = site.refusal()
    assert "leaves nothing for the KV cache" in message
    assert "max-model-len" not in message


def test_a_size_that_heads_or_blocks_forbid_is_refused_with_those_that_work(served: Site) -> None:
    instance(served, 3, 3)
    message = served.refusal()
    assert "tensor_parallel_size 3: 32 query heads are not divisible by 3" in message
    assert message.endswith("sizes that work: 1, 2, 4, 8, 16")
    instance(served, 32, 32)
    assert "are no whole blocks of 128; sizes that work: 1, 2, 4, 8, 16" in served.refusal()


def test_more_devices_than_are_listed_are_refused(served: Site) -> None:
    instance(served, 4, 2, pipeline=4)
    assert "2 x pipeline_parallel_size 4 needs as many devices, 4 are listed" in served.refusal()
    instance(served, 4, 2, pipeline=4, group="serving")
    served.hosts = {f"gpu-{n}": {"service_address": f"10.30.0.{n}"} for n in (1, 2)}
    assert planned(served).combination.pipeline_parallel_size == 4


def test_more_ranks_than_layers_are_refused(served: Site) -> None:
    instance(served, 4, 2, pipeline=2**62, group="serving")
    assert "the model has 32 layers to divide" in served.refusal()


def test_a_config_json_without_heads_is_refused(served: Site) -> None:
    values = {k: v for k, v in eight_b.config("ct-block").items() if "heads" not in k}
    served.file("models/tiny/config.json", json.dumps(values))
    message = served.refusal()
    assert "config.json beside models/tiny/manifest.toml: num_attention_heads is missing" in message
    assert "take config.json from the checkpoint's publisher" in message


@pytest.mark.parametrize("shared", [32, 200])
@pytest.mark.parametrize("workload", [None, "chat"])
def test_more_shared_layers_than_there_are_to_share_with_are_refused(
    served: Site, shared: int, workload: str | None
) -> None:
    values = eight_b.config("ct-block") | {"num_kv_shared_layers": shared}
    served.file("models/tiny/config.json", json.dumps(values))
    served.serving["workload"] = workload
    message = served.refusal()
    assert f"num_kv_shared_layers is {shared}, expected fewer than the model's 32" in message
    assert "take config.json from the checkpoint's publisher" in message
    assert [p.key for p in config_problems(values)[0]] == ["num_kv_shared_layers"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("\udcff", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_a_broken_config_json_is_refused_by_name(served: Site, text: str, expected: str) -> None:
    path = served.root / "models/tiny/config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    message = refusal(served.plan)
    assert "models/tiny/config.json" in message
    assert expected in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", float("inf")),
        ("gpu_memory_utilization", 10**400),
        ("max_num_seqs", 0),
        ("max_num_seqs", -4),
        ("max_num_seqs", 10**30),
        ("max_num_batched_tokens", "many"),
        ("max_num_batched_tokens", [8192]),
        ("max_model_len", 1.5),
        ("max_model_len", "9" * 5000),
        ("max_model_len", True),
        ("kv_cache_memory_bytes", -1),
        ("pipeline_parallel_size", "two"),
    ],
)
def test_a_value_that_vllm_would_refuse_is_refused(served: Site, option: str, value: Any) -> None:
    spec, name = served.fleet().hosts[0].spec, option.replace("_", "-")
    message = refusal(lambda: settings_of(spec, {name: value}, "main"))
    assert message.startswith(f"instances: main: {name} is ")
    assert "expected a" in message
    assert len(message) < 250


# --- ranks, experts and devices -----------------------------------------------------------------


def experts(count: int = 8, inner: int = 192) -> StoredCheckpoint:
    """A small FP8-block model with experts that are two 128-blocks less a half wide."""
    return eight_b.of(*mixture(count, inner))


def mixture(count: int = 8, inner: int = 192) -> tuple[dict[str, Any], dict[str, Any]]:
    specs = eight_b.tensors("deepseek")
    for layer, expert in itertools.product(range(32), range(count)):
        module = f"model.layers.{layer}.mlp.experts.{expert}"
        specs |= linear(f"{module}.gate_proj", inner, 4096, "deepseek")
        specs |= linear(f"{module}.up_proj", inner, 4096, "deepseek")
        specs |= linear(f"{module}.down_proj", 4096, inner, "deepseek")
    return eight_b.config("deepseek") | {"num_experts": count}, specs


def test_whole_experts_are_divided_among_all_gpus_and_the_rest_is_not() -> None:
    one = weights_per_gpu(experts(8))
    dense = weights_per_gpu(EIGHT_B["deepseek"])
    assert weights_per_gpu(experts(8), expert_parallel=8) - dense == (one - dense) // 8
    assert weights_per_gpu(experts(8), expert_parallel=3) - dense == (one - dense) * 3 // 8


def test_experts_that_are_alike_are_looked_at_once() -> None:
    few, many = experts(2), experts(8)
    assert len(few.tensors) < len(many.tensors)
    assert len(few.different_tensors) == len(many.different_tensors)
    assert sum(many.alike.values()) == len(many.tensors)


def test_a_size_that_would_cut_experts_blocks_works_with_whole_experts(served: Site) -> None:
    config, specs = mixture()
    headers = headers_text({"model.safetensors": eight_b.header(specs)})
    served.file("models/tiny/headers.json", headers)
    served.file("models/tiny/config.json", json.dumps(config))
    instance(served, 2, 2)
    assert "experts.0.gate_proj.weight: 96 of 192 a GPU are no whole blocks" in served.refusal()
    instance(served, 2, 2, enable_expert_parallel=True)
    assert planned(served).combination.enable_expert_parallel


def test_ranks_that_share_experts_take_devices_and_each_has_a_cache(served: Site) -> None:
    parallel: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 4}
    instance(served, 2, **parallel)
    message = served.refusal()
    assert "tensor_parallel_size 1 x data-parallel-size 4 needs as many devices" in message
    instance(served, 4, **parallel)
    assert planned(served).combination.data_parallel_size == 4
    ran = fp8fleet("plan", served.inventory(), cwd=served.root)
    assert "sequences of 131,072, in each of 4 ranks; the largest" in ran.out


def test_ranks_of_one_server_that_share_nothing_are_refused_with_servers_in_their_place(
    served: Site,
) -> None:
    for devices in (1, 4):
        instance(served, devices, data_parallel_size=4)
        assert "list more instances in its place, Nginx shares the load" in served.refusal()


@pytest.mark.parametrize(
    ("local", "devices"),
    [({}, 4), ({"data_parallel_size_local": 2}, 2), ({"data_parallel_rank": 0}, 1)],
)
def test_as_many_devices_are_chosen_as_ranks_are_on_the_host(
    served: Site, local: dict[str, Any], devices: int
) -> None:
    served.serving["device_count"] = 8
    instance(served, 0, enable_expert_parallel=True, data_parallel_size=4, **local)
    (server,) = served.host_plan().instances
    assert len(server.devices) == devices


def test_context_parallel_ranks_take_devices_and_their_cache_is_unknown(served: Site) -> None:
    instance(served, 1, prefill_context_parallel_size=2)
    assert "x prefill-context-parallel-size 2 needs as many devices" in served.refusal()
    instance(served, 2, prefill_context_parallel_size=2)
    (server,) = served.host_plan().instances
    assert server.capacity_unknown == "prefill-context-parallel-size uses memory in other ways"


# --- what a device has ---------------------------------------------------------------------------


def shared(site: Site, *options: dict[str, Any]) -> None:
    """Servers on device 0."""
    site.serving["instances"] = [
        {"name": f"s{n}", "port": 8000 + n, "devices": [0], "options": own}
        for n, own in enumerate(options)
    ]


def test_a_cache_of_a_set_size_has_to_be_there_beside_the_weights(served: Site) -> None:
    shared(served, {"kv-cache-memory-bytes": "135G"})
    message = served.refusal()
    assert "device 0 has 139.8 GiB, of which s0 146.1 (kv-cache-memory-bytes and the" in message
    assert message.endswith("lower kv-cache-memory-bytes of s0")


@pytest.mark.parametrize("more", [{}, {"enable-lora": True}])
def test_a_cache_larger_than_the_device_is_refused_whatever_is_known_beside(
    served: Site, more: dict[str, Any]
) -> None:
    shared(served, {"kv-cache-memory-bytes": "500G", **more})
    message = served.refusal()
    assert "s0: kv-cache-memory-bytes is 500.0 GiB, a device has 139.8 GiB" in message


def test_caches_of_servers_that_share_a_device_are_added(served: Site) -> None:
    half = {"gpu-memory-utilization": 0.5}
    sized = {**half, "kv-cache-memory-bytes": "60G"}
    shared(served, sized, half)
    assert "s0 71.1 (kv-cache-memory-bytes and the weights) and s1 69.9 (gpu" in served.refusal()
    shared(served, {**half, "kv-cache-memory-bytes": "40G"}, half)
    assert [i.capacity is not None for i in served.host_plan().instances] == [True, True]


def test_a_share_in_quotes_is_refused_with_the_number_to_write(served: Site) -> None:
    shared(served, {"gpu-memory-utilization": "0.9"}, {"gpu-memory-utilization": "0.9"})
    message = served.refusal()
    assert "s0: gpu-memory-utilization is '0.9'" in message
    assert message.endswith("write 0.9 without quotes")


# --- types ---------------------------------------------------------------------------------------


def test_single_precision_takes_twice_the_bytes_for_weights_and_cache(site: Site) -> None:
    store(site, "none")
    site.serving["accelerator"] = "h200-141g"
    instance(site, dtype="half")
    half = planned(site)
    instance(site, dtype="float32")
    single = planned(site)
    assert single.parts[1].bytes == 2 * half.parts[1].bytes
    assert single.kv_bytes / single.kv_tokens == pytest.approx(
        2 * half.kv_bytes / half.kv_tokens, rel=1e-3
    )
    assert (half.combination.dtype, single.combination.dtype) == ("auto", "float32")


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [("fp8_per_block", 8), ("mxfp8", 8.25), ("mxfp4", 4.25), ("int8_per_channel_weight_only", 16)],
)
def test_quantization_while_loading_reduces_linear_layers_by_its_bits(
    quantization: str, bits: float
) -> None:
    ends = 2 * 1024 * 512 * 2 + 5 * 512 * 2  # embedding, output layer, norms
    layers = weights_per_gpu(small()) - ends
    online = weights_per_gpu(small(), quantization=quantization) - ends
    assert online == layers * bits / 16


def test_a_quantization_of_unknown_effect_leaves_the_cache_unknown() -> None:
    assert estimate(EIGHT_B["none"], settings(quantization="torchao")) is None


MLA = {**eight_b.CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE = {**MLA, "index_topk": 2048, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (MLA, "auto", 1152),
        (MLA, "fp8", 576),
        (MLA, "fp8_ds_mla", 656),
        (MLA, "nvfp4_ds_mla", 352),
        (SPARSE, "auto", 1152 + 132),
        (SPARSE, "fp8", 656 + 132),
        (eight_b.CONFIG, "fp8", 2048),
        (eight_b.CONFIG, "fp8_per_token_head", 2048 + 2 * 8 * 4),
        (eight_b.CONFIG, "int8_per_token_head", 2048 + 2 * 8 * 4),
    ],
)
def test_a_token_takes_the_bytes_of_the_caches_format(
    values: dict[str, Any], dtype: str, expected: int
) -> None:
    assert layout_of(values, dtype=dtype).bytes_per_token == 32 * expected


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (eight_b.CONFIG, "fp8_ds_mla"),
        (eight_b.CONFIG, "int4_per_token_head"),
        ({**MLA, "compress_ratios": [4, 128]}, "fp8"),
    ],
)
def test_a_format_that_is_not_known_makes_no_claim(values: dict[str, Any], dtype: str) -> None:
    assert cache_layout(read_architecture(values), dtype, 8192) is None


# --- headers of some shards ----------------------------------------------------------------------


@pytest.mark.parametrize("stored", [0, 1])
def test_headers_that_lack_shards_of_the_manifest_are_refused(served: Site, stored: int) -> None:
    manifest = served.root / "models/tiny/manifest.toml"
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    entries = [f'\n[[files]]\npath = "{n}"\nsize = 9\nsha256 = "{DIGEST}"\n' for n in names]
    manifest.write_text(manifest.read_text() + "".join(entries))
    header = eight_b.header(eight_b.tensors("ct-block"))
    text = headers_text(dict.fromkeys(names[:stored], header))
    served.file("models/tiny/headers.json", text)
    message = served.refusal()
    assert f"headers.json: lacks the headers of {2 - stored} of the 2 shards in" in message
    assert message.endswith(f"such as {names[stored]}: create the manifest anew")
    served.file("models/tiny/headers.json", headers_text(dict.fromkeys(names, header)))
    assert planned(served).kv_tokens
