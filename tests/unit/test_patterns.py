"""Regular expressions of others: what they fit, and that none takes for ever."""

from __future__ import annotations

import subprocess
import time

import pytest

from fp8fleet import patterns
from fp8fleet.patterns import match_all

NAMES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate_proj", "lm_head"]


def test_a_pattern_fits_from_the_names_start_as_re_match() -> None:
    fits, problems = match_all([".*gate$", "head", "lm_", "("], NAMES)
    assert fits == {".*gate$": {NAMES[0]}, "head": set(), "lm_": {"lm_head"}}
    assert list(problems) == ["("]


def test_names_that_are_no_unicode_are_matched_too() -> None:
    assert match_all(["a."], ["a\ud800"])[0] == {"a.": {"a\ud800"}}


@pytest.mark.parametrize("pattern", ["(.+)+z", "(a|a)*b", ".*" * 30 + "z", r"(\w+\.?)+:"])
def test_a_pattern_that_never_ends_is_stopped(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    began = time.monotonic()
    fits, problems = match_all(["a+", pattern, "a"], ["a" * 60])
    assert time.monotonic() - began < 10
    assert fits == {"a+": {"a" * 60}}
    assert list(problems) == [pattern]
    assert "takes more than 1 s" in problems[pattern]


def test_without_patterns_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    assert match_all([], NAMES) == ({}, {})
