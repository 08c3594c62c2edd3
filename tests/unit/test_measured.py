"""models/<name>/measured.toml: sizes of KV caches that engines logged, and their use."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleets import Site, fp8fleet, refusal
from test_capacity import instance, planned, store

from fp8fleet.measured import (
    Combination,
    Measurement,
    logged_tokens,
    measured_text,
    measured_tokens,
    note_measured,
    read_measured,
)

COMBINATION = Combination(
    model="tiny",
    revision="1",
    engine_release="0.33.0",
    accelerator="h200-141g",
    gpu_memory_utilization=0.92,
    max_num_seqs=1024,
    max_num_batched_tokens=8192,
    max_model_len=131072,
)
DATE = datetime.date(2026, 11, 30)


def measurement(tokens: int = 962_560, **changes: Any) -> Measurement:
    values = {**replace(COMBINATION, **changes).__dict__, "kv_tokens": tokens, "date": DATE}
    return Measurement(**values)


ENTRY = measured_text([measurement()])


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("INFO 11-29 21:34:41 [kv_cache_utils.py:1744] GPU KV cache size: 962,624 tokens", 962_624),
        ("(EngineCore pid=1) INFO [x.py:1] CPU KV cache size: 128 tokens", 128),
        ("GPU KV cache usage: 1.8%, Prefix cache hit rate: 0.0%", None),
        ("GPU KV cache size: many tokens", None),
        ("GPU KV cache size: " + "9" * 5000 + " tokens", None),
    ],
)
def test_the_size_is_read_from_the_engines_log(line: str, tokens: int | None) -> None:
    assert logged_tokens(line) == tokens


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    entries = (
        measurement(),
        measurement(1, kv_cache_dtype="fp8", quantization="fp8_per_tensor", enforce_eager=True),
        measurement(2, model="other", kv_cache_memory_bytes=1 << 30, max_model_len=None),
    )
    path.write_text(measured_text(entries))
    assert read_measured(path) == entries


def test_a_file_that_is_not_there_has_no_entries(tmp_path: Path) -> None:
    assert read_measured(tmp_path / "measured.toml") == ()


def test_a_new_measurement_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "reports/measured.toml"
    for entry in (measurement(1), measurement(2, model="other"), measurement(3)):
        note_measured(entry, path)
    assert [(m.model, m.kv_tokens) for m in read_measured(path)] == [("other", 2), ("tiny", 3)]
    assert [p.name for p in path.parent.iterdir()] == ["measured.toml"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("measured = 1", "'measured': expected nothing but [[measured]] entries"),
        ("[other]", "'other': expected nothing but [[measured]] entries"),
        ("x", "not TOML"),
        ("[[measured]]", "entry 1: model is missing"),
        ("measured = [1]", "entry 1: is 1, expected a table"),
        (ENTRY + "[[measured]]\n", "entry 2: model is missing"),
        (ENTRY + "tokens = 1\n", "entry 1: tokens is an unknown key: remove it"),
        (ENTRY.replace("962560", "0"), "entry 1: kv_tokens is "),
        (ENTRY.replace("962560", "-5"), "entry 1: kv_tokens is "),
        (ENTRY.replace("962560", '"many"'), "entry 1: kv_tokens is "),
        (ENTRY.replace("962560", "1e30"), "entry 1: kv_tokens is "),
        (ENTRY.replace("962560", "9" * 5000), "measured.toml: "),
        (ENTRY.replace("0.92", "nan"), "entry 1: gpu_memory_utilization is "),
        (ENTRY.replace("0.92", "1.5"), "entry 1: gpu_memory_utilization is "),
        (ENTRY.replace("2026-11-30", '"yesterday"'), "entry 1: date is "),
        (ENTRY + ENTRY.partition("\n")[2], "entry 2: has the same settings as entry 1: keep one"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_entry(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(text)
    message = refusal(lambda: read_measured(path))
    assert str(path) in message
    assert expected in message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(lambda: read_measured(path))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "2"},
        {"engine_release": "0.32.0"},
        {"accelerator": "h100-80g"},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"gpu_memory_utilization": 0.9},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 2048},
        {"enforce_eager": True},
    ],
)
def test_a_measurement_counts_for_its_own_combination_only(change: dict[str, Any]) -> None:
    assert measured_tokens([measurement()], COMBINATION, any_length=True) == 962_560
    assert measured_tokens([measurement()], replace(COMBINATION, **change), any_length=True) is None


def test_the_context_makes_a_difference_only_where_layers_have_a_window() -> None:
    shorter = replace(COMBINATION, max_model_len=32768)
    assert measured_tokens([measurement()], shorter, any_length=True) == 962_560
    assert measured_tokens([measurement()], shorter, any_length=False) is None


# --- the plan -----------------------------------------------------------------------------------


@pytest.fixture
def served(site: Site) -> Site:
    """A site whose model is the FP8-block 8B, on H200, measured."""
    store(site, "ct-block")
    site.serving["accelerator"] = "h200-141g"
    site.file("models/tiny/measured.toml", ENTRY)
    return site


def test_the_plan_counts_with_what_was_measured_and_shows_the_estimates_error(
    served: Site,
) -> None:
    capacity = planned(served)
    assert (capacity.measured_kv_tokens, capacity.kv_tokens) == (962_560, 962_768)
    assert capacity.error == pytest.approx(0.0002, abs=0.0001)
    ran = fp8fleet("plan", served.inventory(), cwd=served.root)
    assert "962,560 tokens (measured; the estimate is +0.02 % off)" in ran.out


def test_a_combination_that_was_not_measured_is_estimated(served: Site) -> None:
    instance(served, max_num_seqs=64)
    assert planned(served).measured_kv_tokens is None


def test_a_combination_of_the_plan_is_the_one_that_acceptance_would_note(served: Site) -> None:
    assert planned(served).combination == COMBINATION


def test_a_wrong_file_beside_the_manifest_is_refused(served: Site) -> None:
    served.file("models/tiny/measured.toml", "[[measured]]\n")
    message = served.refusal()
    assert "gpu-1" in message
    assert "models/tiny/measured.toml: entry 1: model is missing" in message


@pytest.mark.parametrize("tokens", [1, 480_000, 1_930_000, 10**18])
def test_a_size_far_from_the_estimate_is_told_and_does_not_count(served: Site, tokens: int) -> None:
    served.file("models/tiny/measured.toml", ENTRY.replace("962560", str(tokens)))
    (server,) = served.host_plan().instances
    assert server.capacity
    assert server.capacity.measured_kv_tokens is None
    (note,) = (note for note in server.notes if "measured" in note)
    assert note.startswith("warning: measured.toml beside models/tiny/manifest.toml: the entry of")
    assert f"kv_tokens = {tokens:,}, the estimate is 962,768, which counts" in note


@pytest.mark.parametrize("tokens", [490_000, 1_920_000])
def test_a_size_within_twice_the_estimate_counts(served: Site, tokens: int) -> None:
    served.file("models/tiny/measured.toml", ENTRY.replace("962560", str(tokens)))
    assert planned(served).measured_kv_tokens == tokens
