"""A host's workload and sampling keys, from the inventory to the servers' options."""

from __future__ import annotations

import json
import re
from typing import Any

import eight_b
import pytest
import yaml
from fleets import INSTANCE, Site, file_text, fp8fleet, lock_text, without
from pydantic import ValidationError

from fp8fleet.headers import headers_text
from fp8fleet.plan import HostPlan, InstancePlan
from fp8fleet.planner import make_plan
from fp8fleet.spec import HostSpec

PROMPT = {"p50": 800, "p95": 4000, "max": 8000}
OUTPUT = {"p50": 200, "p95": 800, "max": 2000}
STATED: dict[str, Any] = {
    "workload_prompt_tokens": PROMPT,
    "workload_output_tokens": OUTPUT,
    "workload_concurrency": 64,
}
WRITTEN = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-dtype")


def store(site: Site, layout: str, **changes: Any) -> None:
    """The model's config.json and headers, beside its manifest."""
    header = eight_b.header(eight_b.tensors(layout, **changes))
    site.file("models/tiny/config.json", json.dumps(eight_b.config(layout, **changes)))
    site.file("models/tiny/headers.json", headers_text({"model.safetensors": header}))


@pytest.fixture
def site(site: Site) -> Site:
    """One H200 host, whose model is the 8B that was measured."""
    store(site, "ct-block")
    site.serving |= {"accelerator": "h200-141g"}
    return site


def options_of(host: HostPlan, name: str = "main") -> dict[str, Any]:
    options = yaml.safe_load(file_text(host, f"/etc/fp8fleet/instances/{name}.yaml"))
    assert isinstance(options, dict)
    return options


def server(site: Site) -> InstancePlan:
    (instance,) = site.host_plan().instances
    return instance


def chosen(site: Site) -> dict[str, Any]:
    return {choice.option: choice.value for choice in server(site).choices}


# What is chosen


def test_without_a_workload_nothing_is_chosen(site: Site) -> None:
    assert server(site).choices == ()
    assert not options_of(site.host_plan()).keys() & set(WRITTEN)


def test_a_name_is_enough(site: Site) -> None:
    site.serving["workload"] = "documents"
    assert options_of(site.host_plan()).keys() >= {"max-model-len", "max-num-seqs"}


def test_stated_quantiles_are_enough(site: Site) -> None:
    site.serving |= STATED
    assert chosen(site)["max-model-len"] == 10240
    assert chosen(site)["max-num-seqs"] == 64


def test_what_is_stated_overrides_what_the_name_stands_for(site: Site) -> None:
    site.serving |= {"workload": "documents", "workload_concurrency": 4}
    first = chosen(site)
    assert first["max-num-seqs"] == 8
    site.serving |= {"workload_prompt_tokens": PROMPT, "workload_latency_goal_ms": 60}
    second = chosen(site)
    assert second["max-model-len"] < first["max-model-len"]
    assert second["max-num-batched-tokens"] < first["max-num-batched-tokens"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_real_lengths_take_the_place_of_quantiles(site: Site, mark: str) -> None:
    lines = [{"prompt_tokens": 100 * n, "output_tokens": 1000 - n} for n in range(1, 41)]
    site.file("lengths.jsonl", mark + "\n".join(map(json.dumps, lines)) + "\n")
    site.serving |= {"workload_lengths": "lengths.jsonl", "workload_concurrency": 10}
    assert chosen(site)["max-model-len"] == 5120
    reasons = {choice.option: choice.reason for choice in server(site).choices}
    assert (
        "longest of 40 requests in lengths.jsonl: prompt 4,000 + output 960"
        in (reasons["max-model-len"])
    )


def test_every_choice_has_a_reason_in_the_plan(site: Site) -> None:
    site.serving["workload"] = "mixed"
    choices = server(site).choices
    assert [choice.option for choice in choices] == [
        "tensor-parallel-size",
        "max-model-len",
        "kv-cache-dtype",
        "max-num-seqs",
        "max-num-batched-tokens",
    ]
    assert all(choice.reason for choice in choices)


@pytest.mark.parametrize(
    "fixed",
    [
        {"max-model-len": 20480},
        {"max-model-len": "32k"},
        {"max-num-seqs": 7},
        {"max-num-batched-tokens": 4096},
        {"kv-cache-dtype": "fp8"},
        {"gpu-memory-utilization": 0.5},
        {"enforce-eager": True},
    ],
)
def test_an_option_of_the_inventory_reaches_the_server_as_it_is(
    site: Site, fixed: dict[str, Any]
) -> None:
    site.serving |= {"workload": "documents", "instances": [{**INSTANCE, "options": fixed}]}
    assert options_of(site.host_plan()).items() >= fixed.items()


def test_eager_mode_is_never_chosen(site: Site) -> None:
    for name in ("chat", "mixed", "documents"):
        site.serving["workload"] = name
        assert "enforce-eager" not in options_of(site.host_plan())


def test_a_warning_of_the_workload_is_a_note_of_the_server(site: Site) -> None:
    site.serving |= {"workload": "documents", "workload_latency_goal_ms": 15}
    assert any(note.startswith("warning: workload_latency_goal_ms") for note in server(site).notes)


def test_the_plan_can_be_made_again_from_the_same_inventory(site: Site) -> None:
    site.serving |= {"workload": "chat"}
    fleet = site.fleet()
    assert make_plan(fleet, site.root) == make_plan(fleet, site.root)


# Servers that are not listed


def unlisted(site: Site, **values: Any) -> HostPlan:
    site.serving = {**without(site.serving, "instances"), "workload": "documents", **values}
    return site.host_plan()


def test_a_workload_and_a_number_of_devices_are_enough_for_servers(site: Site) -> None:
    host = unlisted(site, device_count=4)
    assert [(i.devices, i.options["tensor-parallel-size"]) for i in host.instances] == [
        ((n,), 1) for n in range(4)
    ]
    assert len({instance.port for instance in host.instances}) == 4


def test_equal_servers_are_printed_once(site: Site) -> None:
    unlisted(site, device_count=8)
    text = fp8fleet("plan", site.inventory(), cwd=site.root).out
    assert len(re.findall(r"^  server server-\d ", text, flags=re.M)) == 8
    assert text.count("else as server-0") == 7
    assert text.count("workload         max-num-seqs") == text.count("KV cache  ") == 1
    for number in range(8):
        assert text.count(f"server-{number}: device {number}: ") == 1


def test_servers_that_differ_are_printed_apart(site: Site) -> None:
    other = {**INSTANCE, "name": "other", "port": 8001, "devices": [1]}
    site.serving["instances"] = [INSTANCE, {**other, "options": {"max-num-seqs": 7}}]
    text = fp8fleet("plan", site.inventory(), cwd=site.root).out
    assert "else as" not in text
    assert text.count("KV cache  ") == 2


def test_servers_that_are_chosen_avoid_ports_that_are_taken(site: Site) -> None:
    host = unlisted(site, device_count=2, nginx_listen=8000)
    assert [instance.port for instance in host.instances] == [8001, 8002]


def test_the_streams_of_a_host_are_shared_among_its_servers(site: Site) -> None:
    host = unlisted(site, device_count=2, workload_concurrency=32)
    assert [options_of(host, i.name)["max-num-seqs"] for i in host.instances] == [16, 16]


def test_a_model_too_large_for_a_device_gets_larger_servers(site: Site) -> None:
    store(
        site,
        "none",
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
    )
    host = unlisted(site, device_count=4, workload="chat", workload_concurrency=4)
    assert [instance.options["tensor-parallel-size"] for instance in host.instances] == [2, 2]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "device_count is not set: a serving host needs it or topology for the servers"),
        ({"device_count": 4, "workload": None}, "instances is not set"),
    ],
)
def test_servers_are_not_invented(site: Site, values: dict[str, Any], named: str) -> None:
    site.serving = {**without(site.serving, "instances"), "workload": "documents", **values}
    assert named in site.refusal()


def test_servers_cannot_be_chosen_for_a_model_without_headers(site: Site) -> None:
    (site.root / "models/tiny/headers.json").unlink()
    site.serving = {**without(site.serving, "instances"), "workload": "chat", "device_count": 2}
    assert "no config.json and headers.json" in site.refusal()


def test_servers_are_not_sized_where_nothing_can_be_computed(site: Site) -> None:
    store(site, "none")
    site.serving |= {"accelerator": "ascend-910b", "engine_release": "vllm-ascend-0.23.0"}
    site.file("locks/engine.txt", lock_text(vllm_ascend="0.23.0", vllm="0.23.0"))
    site.serving |= {"platform": "openeuler-22.03", "arch": "aarch64", "engine_python": "3.11"}
    site.serving |= {"workload": "chat", "device_count": 8}
    instances = site.serving.pop("instances")
    message = site.refusal()
    assert "what ascend-910b holds of this model is not known" in message
    assert message.endswith("list instances")
    site.serving["instances"] = instances
    assert server(site).choices


def test_a_listed_server_that_cannot_do_the_workload_is_refused_with_the_sum(site: Site) -> None:
    options = {"gpu-memory-utilization": 0.07}
    site.serving |= {"workload": "chat", "instances": [{**INSTANCE, "options": options}]}
    message = site.refusal()
    assert "does not fit a server of tensor-parallel size 1: 0.07 of 139.80 GiB" in message
    assert "raise tensor_parallel_size, share the server among hosts (group:" in message


def test_a_workload_on_a_cpu_asks_for_servers(site: Site) -> None:
    site.serving = {**without(site.serving, "instances"), "workload": "chat", "accelerator": "cpu"}
    assert "instances is not set: a serving host needs it" in site.refusal()


# Bad input


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"workload": "video"}, "the catalogue has: chat, documents, mixed"),
        ({"workload_concurrency": 8}, "workload_prompt_tokens is not set"),
        (without(STATED, "workload_output_tokens"), "workload_output_tokens is not set"),
        (without(STATED, "workload_concurrency"), "workload_concurrency is not set"),
        ({"workload_latency_goal_ms": 50}, "workload_prompt_tokens is not set"),
        ({**STATED, "workload_lengths": "x.jsonl"}, "workload_lengths has the lengths"),
        *(
            ({**STATED, "workload_concurrency": value}, "workload_concurrency")
            for value in (0, -1, 10**30, 1.5, "many", True)
        ),
        *(
            ({**STATED, "workload_latency_goal_ms": value}, "workload_latency_goal_ms")
            for value in (0, -50, 1e30, "50", True)
        ),
        *(
            ({**STATED, "workload_prompt_tokens": value}, "workload_prompt_tokens")
            for value in (
                800,
                {},
                {"p50": 1, "p95": 2},
                {"p50": 1, "p95": 2, "max": 3, "p99": 3},
                {"p50": 0, "p95": 2, "max": 3},
                {"p50": -5, "p95": 2, "max": 3},
                {"p50": 9, "p95": 2, "max": 30},
                {"p50": 1, "p95": 20, "max": 3},
                {"p50": 1, "p95": 2, "max": 10**30},
                {"p50": 1.5, "p95": 2, "max": 3},
                {"p50": "1", "p95": 2, "max": 3},
                {"p50": True, "p95": 2, "max": 3},
            )
        ),
    ],
)
def test_a_workload_that_means_nothing_is_refused_with_its_key(
    site: Site, values: dict[str, Any], named: str
) -> None:
    site.serving |= values
    assert named in site.refusal()


@pytest.mark.parametrize("goal", ["nan", "inf", "-inf"])
def test_a_goal_that_is_no_number_is_refused(site: Site, goal: str) -> None:
    values = {**site.serving, "workload": "chat", "workload_latency_goal_ms": float(goal)}
    with pytest.raises(ValidationError, match="workload_latency_goal_ms"):
        HostSpec.model_validate(values)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty: one request a line"),
        ("\n\n \n", "empty: one request a line"),
        ("{}", "lengths.jsonl:1: prompt_tokens"),
        ('{"prompt_tokens": 5}', "lengths.jsonl:1: output_tokens"),
        ('{"prompt_tokens": 5, "output_tokens": 6}\n5', "lengths.jsonl:2: 5"),
        ('{"prompt_tokens": 5, "output_tokens": 6}\nx', "lengths.jsonl:2: not JSON"),
        ('{"prompt_tokens": 5, "output_tokens": 6', "lengths.jsonl:1: not JSON"),
        ('{"prompt_tokens": -5, "output_tokens": 6}', "prompt_tokens = -5"),
        ('{"prompt_tokens": 0, "output_tokens": 6}', "prompt_tokens = 0"),
        ('{"prompt_tokens": 5.5, "output_tokens": 6}', "prompt_tokens = 5.5"),
        ('{"prompt_tokens": "5", "output_tokens": 6}', "prompt_tokens = '5'"),
        ('{"prompt_tokens": true, "output_tokens": 6}', "prompt_tokens = True"),
        ('{"prompt_tokens": null, "output_tokens": 6}', "prompt_tokens = None"),
        ('{"prompt_tokens": NaN, "output_tokens": 6}', "not JSON"),
        ('{"prompt_tokens": 1e400, "output_tokens": 6}', "not JSON"),
        (f'{{"prompt_tokens": {10**30}, "output_tokens": 6}}', "prompt_tokens = 1000"),
        ('{"prompt_tokens": 5, "output_tokens": 6, "user": "x"}', "lengths.jsonl:1: user"),
        ('[{"prompt_tokens": 5, "output_tokens": 6}]', "lengths.jsonl:1: ["),
        ('{"prompt_tokens": 5, "output_tokens": 6, "prompt_tokens": 7}', "twice"),
        ("[" * 2000, "nested"),
        ("\ud800", "lengths.jsonl:1: not JSON"),
        ("a,b\n1,2", "lengths.jsonl:1: not JSON"),
    ],
)
def test_a_file_of_lengths_that_is_something_else_is_refused_with_its_line(
    site: Site, text: str, named: str
) -> None:
    site.file("lengths.jsonl", "").write_bytes(text.encode("utf-8", "surrogatepass"))
    site.serving |= {"workload_lengths": "lengths.jsonl", "workload_concurrency": 8}
    assert named in site.refusal()


def test_a_file_of_lengths_that_is_not_there_is_refused(site: Site) -> None:
    site.serving |= {"workload_lengths": "nowhere.jsonl", "workload_concurrency": 8}
    assert "nowhere.jsonl: cannot be read: No such file" in site.refusal()


def test_a_folder_is_no_file_of_lengths(site: Site) -> None:
    site.serving |= {"workload_lengths": "models", "workload_concurrency": 8}
    assert "models: cannot be read" in site.refusal()


def test_a_workload_longer_than_the_models_context_is_refused(site: Site) -> None:
    store(site, "ct-block", max_position_embeddings=8192)
    site.serving["workload"] = "mixed"
    message = site.refusal()
    assert "host gpu-1" in message
    assert "16,384 tokens" in message
    assert "the model's context is 8,192" in message


# Sampling


def test_sampling_reaches_the_server_by_vllms_own_option(site: Site) -> None:
    site.serving["sampling"] = {"temperature": 0, "top_k": 20, "max_tokens": 512}
    assert options_of(site.host_plan())["override-generation-config"] == {
        "temperature": 0,
        "top_k": 20,
        "max_new_tokens": 512,
    }


def test_without_sampling_the_option_is_not_set(site: Site) -> None:
    assert "override-generation-config" not in options_of(site.host_plan())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temperature": NaN}', "temperature=nan"),
        ('{"temperature": Infinity}', "temperature=inf"),
        ('{"temperature": "hot"}', "temperature='hot'"),
        ('{"temperature": -2}', "temperature=-2"),
        ('{"top_p": 0}', "top_p=0"),
        ('{"top_k": 2.5}', "top_k=2.5"),
        ('{"top_k": [20]}', "top_k=[20]"),
        ('{"min_p": 2}', "min_p=2"),
        ('{"repetition_penalty": 0}', "repetition_penalty=0"),
        ('{"max_new_tokens": 0}', "max_tokens=0"),
    ],
)
def test_a_value_that_no_request_can_have_is_warned_of(site: Site, text: str, named: str) -> None:
    site.file("models/tiny/generation_config.json", text)
    (warning,) = [note for note in server(site).notes if note.startswith("warning: sampling")]
    assert f"sampling: {named} (models/tiny/generation_config.json): " in warning
    site.file("models/tiny/generation_config.json", '{"temperature": 0.6, "top_k": 50}')
    site.serving["instances"] = [{**INSTANCE, "options": {"override-generation-config": text}}]
    (warning,) = [note for note in server(site).notes if note.startswith("warning: sampling")]
    assert f"sampling: {named} (inventory): " in warning


def test_sound_values_are_not_warned_of_and_those_of_the_inventory_mend_bad_ones(
    site: Site,
) -> None:
    values = '"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0'
    more = '"repetition_penalty": 1.05, "max_new_tokens": 2048'
    site.file("models/tiny/generation_config.json", f"{{{values}, {more}}}")
    assert not [note for note in server(site).notes if "sampling" in note]
    site.file("models/tiny/generation_config.json", '{"temperature": "hot"}')
    site.serving["sampling"] = {"temperature": 0.6}
    assert not [note for note in server(site).notes if "sampling" in note]


def test_the_plan_shows_what_the_models_file_says_and_where_from(site: Site) -> None:
    site.file("models/tiny/generation_config.json", '{"temperature": 0.6, "do_sample": true}')
    assert str(server(site).sampling) == (
        "temperature=0.6 (models/tiny/generation_config.json); else vLLM's own defaults"
    )


def test_the_plan_shows_which_value_the_inventory_replaces(site: Site) -> None:
    site.file("models/tiny/generation_config.json", '{"temperature": 0.6, "top_p": 0.9}')
    site.serving["sampling"] = {"temperature": 0.2}
    sampling = server(site).sampling
    assert sampling.values == {"temperature": 0.2, "top_p": 0.9}
    assert sampling.sources == {
        "temperature": "inventory",
        "top_p": "models/tiny/generation_config.json",
    }


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"generation-config": "vllm"}, "else vLLM's own defaults"),
        ({"generation-config": "/srv/own"}, "else the generation_config.json of /srv/own"),
        (
            {"generation-config": "vllm", "override-generation-config": '{"top_p": 0.5}'},
            "top_p=0.5 (inventory); else vLLM's own defaults",
        ),
    ],
)
def test_the_plan_follows_vllms_own_options(
    site: Site, options: dict[str, Any], shown: str
) -> None:
    site.file("models/tiny/generation_config.json", '{"temperature": 0.6}')
    site.serving["instances"] = [{**INSTANCE, "options": options}]
    assert str(server(site).sampling) == shown


def test_a_model_whose_file_is_not_stored_is_told(site: Site) -> None:
    assert "models/tiny has no copy" in str(server(site).sampling)


@pytest.mark.parametrize("text", ["", "[]", "{", "\0", '{"temperature": '])
def test_a_models_file_that_is_broken_is_refused(site: Site, text: str) -> None:
    site.file("models/tiny/generation_config.json", text)
    assert "generation_config.json: not" in site.refusal()


def test_sampling_in_two_places_is_refused(site: Site) -> None:
    site.serving["sampling"] = {"temperature": 0.8}
    options = {"override-generation-config": {"temperature": 0.7}}
    site.serving["instances"] = [{**INSTANCE, "options": options}]
    assert "leave one out" in site.refusal()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": None},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": "0.8"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 0.5},
        {"min_p": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 10**30},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 10**30},
        {"max_new_tokens": 5},
        {"presence_penalty": 1},
        [],
        "temperature=0.8",
    ],
    ids=str,
)
def test_sampling_that_no_server_would_take_is_refused(site: Site, sampling: Any) -> None:
    site.serving["sampling"] = sampling
    assert "sampling" in site.refusal()


@pytest.mark.parametrize("value", ["{", "x", "'a': 1"])
def test_an_override_that_is_no_table_is_refused(site: Site, value: str) -> None:
    options = {"override-generation-config": value}
    site.serving["instances"] = [{**INSTANCE, "options": options}]
    assert "override-generation-config" in site.refusal()


@pytest.mark.parametrize("name", ["headers.json", "config.json"])
def test_a_stored_file_that_is_broken_is_refused_with_its_name(site: Site, name: str) -> None:
    site.file(f"models/tiny/{name}", "{")
    site.serving["workload"] = "chat"
    assert name in site.refusal()


def test_more_streams_never_get_fewer_sequences(site: Site) -> None:
    """vLLM sets memory apart for every sequence: too many of them would leave no KV cache."""
    keys = {"workload": "chat", "device_count": 1}
    chosen = []
    for streams in (512, 4096, 32768, 65536):
        host = unlisted(site, **keys, workload_concurrency=streams)
        chosen.append(options_of(host, "server-0")["max-num-seqs"])
    assert chosen == sorted(chosen)
    assert chosen[0] == 512 < chosen[-1]
