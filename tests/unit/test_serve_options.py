"""Options of `vllm serve` against the releases' own parsers, their configs and the checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fleets import INSTANCE, Site

from fp8fleet import catalog
from fp8fleet.findings import Finding
from fp8fleet.inventory import load_fleet
from fp8fleet.plan import FleetPlan
from fp8fleet.serve_options import Checkpoint, fits, judge, kinds

BLOCK = Checkpoint("compressed-tensors-fp8-block", "bfloat16")
BF16 = Checkpoint("none", "bfloat16")
OLD, NEW = "0.19.1", "0.33.0"
TABLED = ["0.17.0", "0.19.1", "0.21.0", "0.23.0", "0.32.0", "0.33.0"]


def errors(release: str, options: dict[str, Any], **known: Any) -> list[Finding]:
    return [f for f in judge(release, options, **known) if f.severity == "error"]


def only(release: str, options: dict[str, Any], **known: Any) -> Finding:
    (finding,) = judge(release, options, **known)
    return finding


# The tables


def test_the_releases_that_count_have_tables_of_their_own() -> None:
    known = set(catalog.newest_first("vllm"))
    assert set(catalog.option_tables()) == known - {"0.6.3"}
    assert set(TABLED) < known
    for version, table in catalog.option_tables().items():
        assert len(table.options) > 200, version
        assert version in table.source


@pytest.mark.parametrize("release", TABLED)
def test_a_table_has_what_was_tried_on_the_real_parser(release: str) -> None:
    table = catalog.option_tables()[release]
    memory = table.options["gpu-memory-utilization"]
    assert (memory.above, memory.at_most) == (0, 1)
    assert memory.default == (0.9 if release in ("0.17.0", "0.19.1") else 0.92)
    assert table.short_names["tp"] == "tensor-parallel-size"
    assert table.false == ("denied" if release in ("0.32.0", "0.33.0") else "ignored")
    cache = table.options["kv-cache-dtype"]
    assert "fp8" in (*cache.choices, *cache.later)
    assert "compressed-tensors" in table.options["quantization"].later
    assert ("fp8" in table.options["quantization"].online) == (release not in ("0.32.0", "0.33.0"))


def test_what_the_catalogue_says_of_the_past_is_what_the_tables_have() -> None:
    for option, known in catalog.serve_options().items():
        for version, table in catalog.option_tables().items():
            if known.accepted is not None:
                assert known.is_accepted(version) == (option in table.names), (option, version)


def test_a_release_without_a_table_is_judged_where_its_neighbours_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = {name: catalog.option_tables()[name] for name in ("0.19.1", "0.23.0")}
    monkeypatch.setattr(catalog, "option_tables", lambda: tables)
    assert catalog.option_tables_for("0.21.0") == (tables, False)
    finding = only("0.21.0", {"rope-theta": 5e5})
    assert "(as 0.19.1 and 0.23.0 have it: vLLM 0.21.0 has no table)" in finding.message
    assert "humming" not in tables["0.19.1"].options["quantization"].later
    assert judge("0.21.0", {"quantization": "humming"}) == ()
    assert only("0.21.0", {"quantization": "nosuch"}).code == "bad-value"


def test_before_the_oldest_table_only_the_known_past_counts() -> None:
    assert errors("0.6.3", {"rope-theta": 1, "swap-space": 4, "max-num-seqs": 8}) == []
    wrong = {"dry-run": True, "kv-cache-dtype": "fp16", "hf-overrides": "{rope_theta:5}"}
    assert [finding.code for finding in errors("0.6.3", wrong)] == [
        "unknown-option", "bad-value", "bad-value",
    ]  # fmt: skip


def test_before_the_oldest_table_a_warning_says_what_nothing_judged() -> None:
    assert [finding.line for finding in judge("0.6.3", {"max-num-seqs": 8, "nonsense": 3})] == [
        "warning: option 'nonsense': is in no release that has a table [not-judged]: look whether"
        " vLLM 0.6.3 has it",
        "warning: vLLM 0.6.3 has no table of options: most of them were not judged [not-judged]:"
        " start one server first",
    ]
    assert judge("0.6.3", {}) == ()


# Names


@pytest.mark.parametrize("release", TABLED)
@pytest.mark.parametrize(
    "option",
    ["rope-theta", "rope-scaling", "dry-run", "task", "device", "num-scheduler-steps"],
)
def test_the_guides_options_are_gone_and_the_message_says_what_to_write(
    release: str, option: str
) -> None:
    finding = only(release, {option: 1})
    assert finding.code == "unknown-option"
    assert f"option {option!r}: vLLM {release} has no --{option}" == finding.message
    assert finding.remedy.startswith(("write instead ", "leave it out: "))
    assert "nothing:" not in finding.remedy


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("enable-reasoning", "reasoning-parser alone is enough"),
        ("worker-use-ray", "distributed-executor-backend"),
        ("rope-scaling", 'hf-overrides = {"rope_parameters": {"rope_type": "yarn"'),
        ("cuda-graph-sizes", "cudagraph-capture-sizes"),
        ("max-seq-len-to-capture", "max-cudagraph-capture-size"),
        ("speculative-model", "speculative-config"),
    ],
)
def test_what_took_an_old_options_place_is_told_and_not_what_is_spelt_like_it(
    option: str, words: str
) -> None:
    assert words in only(NEW, {option: 1}).remedy


@pytest.mark.parametrize(
    "name",
    ["api-key\uff1dS3CRET", "api-key:S3CRET", "hf-tokenS3CRET", "x S3CRET", "\nS3CRET", "x=S3CRET"],
)
def test_of_a_name_that_is_none_only_what_can_be_a_name_is_shown(name: str) -> None:
    assert "S3CRET" not in only(NEW, {name: 1}).line


def test_a_misspelt_option_is_named_with_the_closest_spelling() -> None:
    finding = only(NEW, {"gpu-memory-utilisation": 0.9})
    assert finding.remedy == "did you mean gpu-memory-utilization?"


def test_an_option_of_other_releases_says_which_have_it() -> None:
    assert "0.33.0 has it" in only("0.19.1", {"device-memory-utilization": 0.9}).message


def test_a_cut_off_name_is_told_in_full() -> None:
    finding = only(NEW, {"max-num-batched": 8192})
    assert (finding.code, finding.remedy) == ("abbreviated-option", "write max-num-batched-tokens")


def test_one_option_by_two_names_is_refused() -> None:
    options = {"gpu-memory-utilization": 0.9, "device-memory-utilization": 0.8}
    assert only(NEW, options).code == "option-twice"


@pytest.mark.parametrize(
    ("release", "accepted"), [("0.23.0", False), ("0.32.0", False), ("0.33.0", True)]
)
def test_disable_log_requests_came_back(release: str, accepted: bool) -> None:
    assert (errors(release, {"disable-log-requests": True}) == []) == accepted


def test_a_deprecated_option_is_warned_of() -> None:
    finding = only("0.33.0", {"log-config-file": "/etc/log.json"})
    assert (finding.severity, finding.code) == ("warning", "deprecated")


# Values


@pytest.mark.parametrize("release", TABLED)
@pytest.mark.parametrize(
    "options",
    [
        {"max-model-len": 32768},
        {"max-model-len": "32k"},
        {"max-model-len": "auto"},
        {"max-model-len": -1},
        {"max-num-batched-tokens": "8K"},
        {"gpu-memory-utilization": 1},
        {"gpu-memory-utilization": "0.5"},
        {"kv-cache-dtype": "fp8"},
        {"enable-prefix-caching": True},
        {"no-enable-prefix-caching": True},
        {"enforce-eager": False},
        {"hf-overrides": {"max_position_embeddings": 4096}},
        {"override-generation-config": '{"temperature": 0.5}'},
        {"allowed-origins": '["*"]'},
        {"lora-modules": ["a=/x", "b=/y"]},
        {"seed": 0},
        {"distributed-executor-backend": "uni"},
        {"quantization": None},
    ],
)
def test_values_that_the_real_parsers_take_are_accepted(
    release: str, options: dict[str, Any]
) -> None:
    assert judge(release, options, accelerator="cpu") == ()


@pytest.mark.parametrize("release", TABLED)
@pytest.mark.parametrize(
    "options",
    [
        {"gpu-memory-utilization": 1.5},
        {"gpu-memory-utilization": 0},
        {"gpu-memory-utilization": math.nan},
        {"gpu-memory-utilization": math.inf},
        {"gpu-memory-utilization": True},
        {"kv-cache-dtype": "fp16"},
        {"kv-cache-dtype": ["fp8", "auto"]},
        {"max-num-seqs": "many"},
        {"max-num-seqs": 0},
        {"max-num-seqs": 1.5},
        {"max-num-seqs": "64k"},
        {"max-num-seqs": 10**5000},
        {"max-model-len": "32q"},
        {"max-model-len": "1.5K"},
        {"max-model-len": False},
        {"dtype": "fp8"},
        {"enforce-eager": "yes"},
        {"enforce-eager": 1},
        {"compilation-config": "level 3"},
        {"override-generation-config": "{"},
        {"served-model-name": ["-x"]},
        {"lora-modules": []},
        {"quantization": "nosuch"},
    ],
)
def test_values_that_the_parser_or_the_config_refuses_are_refused(
    release: str, options: dict[str, Any]
) -> None:
    (option,) = options
    finding = only(release, options)
    assert finding.severity == "error"
    assert finding.code in ("bad-value", "ignored-value")
    assert finding.message.startswith(f"option {option!r}: ")
    assert finding.line.isprintable()


def test_a_refused_value_says_what_is_expected() -> None:
    finding = only(NEW, {"gpu-memory-utilization": 1.5})
    assert "does not take 1.5, expected a number above 0 and at most 1" in finding.message
    finding = only(NEW, {"kv-cache-dtype": "fp16"})
    assert "expected one of auto, bfloat16, float16, fp8" in finding.message
    assert finding.remedy.startswith("leave it out (auto)")


@pytest.mark.parametrize("release", TABLED)
@pytest.mark.parametrize(
    "option", ["hf-overrides", "additional-config", "model-loader-extra-config"]
)
@pytest.mark.parametrize("value", ["{rope_theta:500000}", "{", "x", "[1]", "7", 7])
def test_a_text_for_an_option_that_takes_a_map_has_to_be_json_of_one(
    release: str, option: str, value: object
) -> None:
    finding = only(release, {option: value})
    assert f"does not take {value!r}, expected a map (JSON)" in finding.message
    assert finding.remedy.startswith("write a YAML map, or JSON with its quotes")
    assert judge(release, {option: '{"x": {"y": 1}}'}) == ()
    assert judge(release, {option: None}) == ()


def test_json_that_lost_its_quotes_is_told_for_every_option_that_takes_a_map() -> None:
    tables = catalog.option_tables()[NEW].options
    maps = [name for name, facts in tables.items() if "object" in facts.takes]
    assert len(maps) > 10
    for name in maps:
        finding = only(NEW, {name: "{level:3}"})
        assert (finding.code, "JSON with its quotes" in finding.remedy) == ("bad-value", True)


def test_a_value_that_is_missing_is_told_as_that() -> None:
    finding = only(NEW, {"max-num-seqs": True})
    assert finding.message == "option 'max-num-seqs': needs a value, expected an integer at least 1"


def test_a_map_has_only_the_keys_that_the_release_knows() -> None:
    assert judge("0.33.0", {"compilation-config": {"cudagraph_mode": "FULL"}}) == ()
    for value in ({"level": 3}, '{"level": 3}'):
        finding = only("0.33.0", {"compilation-config": value})
        assert "vLLM 0.33.0 has no 'level' in it" in finding.message
        assert "cudagraph_mode, " in finding.remedy
    assert judge("0.33.0", {"hf-overrides": {"anything": {"level": 3}}}) == ()


def test_a_yaml_list_for_a_json_option_is_told_to_be_json() -> None:
    finding = only(NEW, {"allowed-origins": ["*"]})
    assert finding.remedy == "write the list as JSON in quotes: '[\"*\"]'"


@pytest.mark.parametrize(("release", "ignored"), [(OLD, True), ("0.23.0", True), (NEW, False)])
def test_false_is_silently_ignored_by_older_releases(release: str, ignored: bool) -> None:
    found = judge(release, {"enable-prefix-caching": False})
    assert [finding.code for finding in found] == (["ignored-value"] if ignored else [])
    if ignored:
        assert found[0].remedy == "write no-enable-prefix-caching: true"


def test_rope_theta_in_hf_overrides_is_ignored_by_transformers_5_only() -> None:
    for value in ({"rope_theta": 1e6}, json.dumps({"rope_theta": 1e6})):
        finding = only("0.23.0", {"hf-overrides": value}, transformers=5)
        assert finding.code == "ignored-value"
        assert "rope_parameters" in finding.remedy
        assert judge("0.23.0", {"hf-overrides": value}, transformers=4) == ()


def test_kinds_of_words_are_vllms() -> None:
    assert kinds("7") == {"word", "integer", "number"}
    assert kinds("-7") == {"word", "negative", "number"}
    assert kinds("1_000") == {"word", "integer", "number"}
    assert "size" in kinds("1.5k")
    assert "size" not in kinds("1.5K")
    assert kinds("[1]") == {"word", "array"}
    assert kinds("[" * 100_000) == {"word"}


def test_no_word_of_an_option_may_look_like_an_option() -> None:
    facts = catalog.option_tables()[NEW].options["tokenizer"]
    assert fits(facts, "x")
    assert not fits(facts, "--x")


# The checkpoint


def test_fp8_for_a_compressed_tensors_checkpoint_is_refused() -> None:
    finding = only(NEW, {"quantization": "fp8"}, checkpoint=BLOCK)
    assert finding.code == "checkpoint"
    assert finding.remedy == "leave it out: it is read from the checkpoint's config.json"


@pytest.mark.parametrize("method", ["fp8_per_tensor", "fp8_per_block", "fp8_per_channel"])
def test_online_quantization_is_for_bf16_checkpoints_of_releases_that_have_it(method: str) -> None:
    assert judge(NEW, {"quantization": method}, checkpoint=BF16) == ()
    assert only(NEW, {"quantization": method}, checkpoint=BLOCK).code == "checkpoint"
    assert only(OLD, {"quantization": method}, checkpoint=BF16).code == "bad-value"


@pytest.mark.parametrize(
    ("release", "method", "checkpoint", "fine"),
    [
        ("0.23.0", "fp8", BF16, True),
        ("0.33.0", "fp8", BF16, False),
        ("0.33.0", "fp8", Checkpoint("fp8-block"), True),
        ("0.33.0", "fp8", Checkpoint("fp8"), True),
        ("0.33.0", "compressed-tensors", BLOCK, True),
        ("0.33.0", "compressed-tensors", BF16, False),
        ("0.33.0", "gptq_marlin", Checkpoint("gptq"), True),
        ("0.33.0", "fp8", Checkpoint(None), True),
        ("0.33.0", "fp8", Checkpoint("unknown"), True),
        ("vllm-ascend-0.23.0", "ascend", BF16, True),
    ],
)
def test_a_method_fits_the_checkpoint_or_is_refused(
    release: str, method: str, checkpoint: Checkpoint, fine: bool
) -> None:
    found = errors(release, {"quantization": method}, checkpoint=checkpoint)
    assert (found == []) == fine


def test_a_deprecated_method_needs_its_permission() -> None:
    assert only(NEW, {"quantization": "fp_quant"}).code == "bad-value"
    options = {"quantization": "fp_quant", "allow-deprecated-quantization": True}
    assert judge(NEW, options) == ()


def test_a_cache_of_another_type_than_the_models_is_refused() -> None:
    assert only(NEW, {"kv-cache-dtype": "float16"}, checkpoint=BF16).code == "checkpoint"
    assert judge(NEW, {"kv-cache-dtype": "bfloat16"}, checkpoint=BF16) == ()
    both = {"kv-cache-dtype": "float16", "dtype": "half"}
    assert judge(NEW, both, checkpoint=BF16) == ()


def test_eager_mode_is_warned_of_except_on_cpus() -> None:
    finding = only(NEW, {"enforce-eager": True}, accelerator="h200-141g")
    assert finding.severity == "warning"
    assert "2,142 instead of 10,860 output tokens/s" in finding.message
    assert judge(NEW, {"enforce-eager": True}, accelerator="cpu") == ()
    assert judge(NEW, {"enforce-eager": False}, accelerator="h200-141g") == ()


# The plan


def test_the_plan_refuses_what_the_release_refuses(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "options": {"gpu-memory-utilization": 1.5}}]
    message = site.refusal()
    assert "instance main: option 'gpu-memory-utilization': vLLM 0.33.0 does not take" in message
    assert "\n" not in message


def test_the_plan_notes_what_is_slow(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "options": {"enforce-eager": True}}]
    assert any("2,142" in note for note in site.host_plan().notes)


def test_every_option_of_the_worked_example_is_accepted_by_its_release(prod: FleetPlan) -> None:
    specs = {host.name: host.spec for host in load_fleet(prod.inventory).hosts}
    judged = 0
    for name, host in prod.hosts.items():
        release = specs[name].engine_release
        for instance in host.instances:
            assert release
            assert judge(release, instance.options, accelerator=specs[name].accelerator) == ()
            judged += len(instance.options)
    assert judged
