"""The gates: what fits, what does not and why, and the newest release that would."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fp8fleet import catalog
from fp8fleet.catalog_check import (
    Combination,
    Target,
    advice,
    check,
    fits,
    is_fp8_block,
    not_judged,
)
from fp8fleet.cli import main

UBUNTU = Target("ubuntu-22.04", python="3.12", accelerator="h100-80g", driver="580.95.05")
KYLIN = Target("kylin-v10", python="3.12", accelerator="a100-80g", driver="580.95.05")


def refusals(release: str, target: Target) -> dict[str, str]:
    """The messages of the errors, by gate."""
    return {v.gate: v.message for v in check(release, target) if v.severity == "error"}


def warnings(release: str, target: Target) -> dict[str, str]:
    return {v.gate: v.message for v in check(release, target) if v.severity == "warning"}


def test_a_release_that_fits_has_nothing_against_it() -> None:
    assert check("0.33.0", UBUNTU) == ()


def test_a_newer_wheel_tag_than_the_platforms_c_library_is_refused() -> None:
    message = refusals("0.19.1", KYLIN)["wheel"]
    assert "its wheel needs glibc 2.31, kylin-v10 has 2.28" in message


def test_a_requirement_that_does_not_resolve_is_refused_by_its_name() -> None:
    message = refusals("0.22.0", KYLIN)["resolution"]
    assert "glibc 2.28" in message
    assert "llguidance" in message
    assert fits("0.21.0", KYLIN)


@pytest.mark.parametrize("release", catalog.newest_first("vllm"))
def test_nothing_resolves_on_kylin_v10_aarch64(release: str) -> None:
    assert not fits(release, replace(KYLIN, architecture="aarch64"))


def test_a_build_from_source_is_not_bound_by_wheels() -> None:
    target = replace(KYLIN, architecture="aarch64", build="source")
    assert fits("0.33.0", target)


def test_a_build_from_source_is_said_to_be_untested() -> None:
    message = warnings("0.33.0", replace(KYLIN, build="source"))["source"]
    assert message == (
        "engine_build = 'source': nobody has built vLLM 0.33.0 on a host with fp8fleet"
    )


def test_a_release_without_wheels_for_the_architecture_is_refused() -> None:
    message = refusals("0.6.3", replace(UBUNTU, architecture="aarch64"))["wheel"]
    assert "has wheels for x86_64, not for aarch64" in message


@pytest.mark.parametrize(
    ("release", "driver", "fitting"),
    [
        ("0.19.1", "525.60.13", True),
        ("0.19.1", "525.60.11", False),
        ("0.33.0", "580.65.06", True),
        ("0.33.0", "580.65.05", False),
        ("0.33.0", "575.57.08", False),
        ("0.33.0", "590.44.01", True),
    ],
)
def test_the_driver_floor_follows_the_wheels_cuda(release: str, driver: str, fitting: bool) -> None:
    assert fits(release, replace(UBUNTU, driver=driver)) == fitting


def test_a_driver_of_nvidias_says_nothing_of_another_accelerator() -> None:
    assert not fits("0.33.0", replace(UBUNTU, driver="470.1"))
    assert fits("0.33.0", replace(UBUNTU, accelerator="cpu", driver="470.1"))
    assert not fits("0.33.0", replace(UBUNTU, accelerator=None, driver="470.1"))


def test_a_driver_branch_that_has_ended_only_warns() -> None:
    found = warnings("0.19.1", replace(UBUNTU, driver="535.104.05"))
    assert "branch 535 ended in 2026-06" in found["driver-life"]


def test_the_guides_pydantic_pin_is_refused_for_the_guides_release() -> None:
    target = replace(UBUNTU, pins=("pydantic==1.10.17",))
    assert refusals("0.6.3", target) == {
        "pin": "engine_pins = 'pydantic==1.10.17': vLLM 0.6.3 needs pydantic>=2.9,"
        " so that nothing resolves"
    }


@pytest.mark.parametrize(
    ("pin", "fitting"),
    [
        ("pydantic==2.12.0", True),
        ("pydantic==2.11.9", False),
        ("torch==2.14.0", True),
        ("torch==2.14.0+cpu", True),
        ("torch==2.13.0", False),
        ("numpy==1.0", True),
        ("vllm==0.33.0", True),
        ("vllm==0.6.3", False),
        ("VLLM==0.6.3", False),
    ],
)
def test_a_pin_has_to_lie_in_the_releases_range(pin: str, fitting: bool) -> None:
    assert fits("0.33.0", replace(UBUNTU, pins=(pin,))) == fitting


def test_a_transformers_too_old_for_gemma_4_warns() -> None:
    found = warnings("0.33.0", replace(UBUNTU, pins=("transformers==5.2.0",)))
    assert "Gemma 4 needs transformers>=5.5.1" in found["gemma4"]


@pytest.mark.parametrize(
    ("accelerator", "severity"),
    [
        ("h100-80g", None),
        ("l40s-48g", None),
        ("a100-80g", "warning"),
        ("v100-32g", "error"),
        ("cpu", "warning"),
    ],
)
def test_block_fp8_by_accelerator(accelerator: str, severity: str | None) -> None:
    target = replace(UBUNTU, accelerator=accelerator, fp8_block=True)
    found = {verdict.gate: verdict.severity for verdict in check("0.33.0", target)}
    assert found.get("fp8-block") == severity


def test_block_fp8_on_ascend_is_refused_with_the_alternative() -> None:
    target = Target("openeuler-24.03", "aarch64", accelerator="ascend-910b", fp8_block=True)
    (verdict,) = check("vllm-ascend-0.23.0", target)
    assert verdict.severity == "error"
    assert fits("vllm-ascend-0.23.0", replace(target, fp8_block=False))
    assert "with a BF16 checkpoint it would be vllm-ascend-0.23.0" in advice(
        "vllm-ascend-0.23.0", target
    )


def test_a_cuda_release_does_not_run_on_ascend() -> None:
    target = Target("openeuler-24.03", "aarch64", accelerator="ascend-910b")
    assert "runs on nvidia and cpu, not on ascend" in refusals("0.33.0", target)["accelerator"]
    assert advice("0.33.0", target) == "the newest that fits is vllm-ascend-0.23.0"


@pytest.mark.parametrize(
    ("accelerator", "dtype", "fitting"),
    [
        ("h100-80g", "fp8", True),
        ("l40s-48g", "fp8_e5m2", True),
        ("a100-80g", "fp8", False),
        ("a100-80g", "auto", True),
        ("h100-80g", "fp16", False),
        ("h100-80g", "FP16", False),
        ("h100-80g", "FP8", False),
        ("h100-80g", "bogus", False),
        ("h100-80g", "", False),
        ("h100-80g", "float16", True),
        ("a100-80g", None, True),
    ],
)
def test_an_fp8_cache_needs_capability_8_9(
    accelerator: str, dtype: str | None, fitting: bool
) -> None:
    target = replace(UBUNTU, accelerator=accelerator, kv_cache_dtype=dtype)
    assert fits("0.33.0", target) == fitting


def test_a_sites_table_warns_of_what_is_not_in_it_and_never_refuses() -> None:
    line = Combination("580.95.05", "0.33.0", "13.0")
    assert check("0.33.0", replace(UBUNTU, validated=(line,))) == ()
    for other in (
        Combination("580.82.07", "0.33.0"),
        Combination("580.95.05", "0.32.0"),
        Combination("580.95.05", "0.33.0", "12.8"),
    ):
        target = replace(UBUNTU, validated=(other,))
        assert fits("0.33.0", target)
        assert (
            "no line for driver 580.95.05 and vLLM 0.33.0"
            in (warnings("0.33.0", target)["validated"])
        )


def test_the_newest_that_fits_is_named_or_what_has_to_change() -> None:
    assert advice("0.33.0", KYLIN) == "the newest that fits is 0.21.0"
    old = replace(KYLIN, driver="535.104.05", fp8_block=True)
    assert advice("0.33.0", old) == (
        "nothing fits as it is; with driver 580.65.06 or newer it would be 0.21.0"
    )
    arm = replace(KYLIN, architecture="aarch64")
    assert advice("0.33.0", arm).endswith(
        "built on the host (engine_build = 'source', untested) it would be 0.33.0"
    )


def test_a_cache_type_that_stands_in_the_way_is_named_with_the_release_that_fits_without() -> None:
    ampere = replace(UBUNTU, accelerator="a100-80g", kv_cache_dtype="fp8")
    assert advice("0.33.0", ampere) == (
        "nothing fits as it is; without kv-cache-dtype = 'fp8' it would be 0.33.0"
    )
    old = replace(ampere, driver="535.104.05", platform="kylin-v10", fp8_block=True)
    assert advice("0.33.0", old) == (
        "nothing fits as it is; without kv-cache-dtype = 'fp8' and with driver 580.65.06 or newer"
        " it would be 0.21.0"
    )
    assert advice("0.33.0", replace(KYLIN, kv_cache_dtype="auto")) == (
        "the newest that fits is 0.21.0"
    )


@pytest.mark.parametrize(
    ("release", "accelerator", "driver", "said"),
    [
        ("0.33.0", "h100-80g", "580.95.05", []),
        ("0.33.0", "h100-80g", None, ["driver"]),
        ("0.33.0", None, None, ["driver", "accelerator"]),
        ("0.33.0", "cpu", None, []),
        ("0.33.0", "cpu", "470.1", ["driver 470.1 (only NVIDIA's is)"]),
        ("vllm-ascend-0.23.0", "ascend-910b", "25.0", ["driver 25.0 (only NVIDIA's is)"]),
        ("vllm-ascend-0.23.0", None, "25.0", ["driver 25.0 (only NVIDIA's is)", "accelerator"]),
    ],
)
def test_what_was_not_judged_is_told(
    release: str, accelerator: str | None, driver: str | None, said: list[str]
) -> None:
    target = Target("ubuntu-22.04", accelerator=accelerator, driver=driver)
    assert list(not_judged(release, target)) == said


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("fp8-block", True),
        ("compressed-tensors-fp8-block", True),
        ("fp8", False),
        ("none", False),
        (None, False),
    ],
)
def test_the_manifest_tells_whether_a_checkpoint_is_block_fp8(
    name: str | None, block: bool
) -> None:
    assert is_fp8_block(name) == block


# The command


CHECK = ["catalog", "check", "0.33.0", "--platform", "ubuntu-22.04"]


def test_catalog_lists_everything_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog"]) == 0
    out = capsys.readouterr().out
    for name in [*catalog.releases(), *catalog.accelerators(), *catalog.platforms()]:
        assert f"  {name} " in out
    assert out.count("source: ") >= len(catalog.releases()) + len(catalog.accelerators())


def test_catalog_as_json_holds_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert set(tables) == {"releases", "accelerators", "platforms", "options"}
    assert tables["accelerators"]["h200-141g"]["pci"][0] == "10de:2335"


TOLD = ["--gpu", "h100-80g", "--driver", "580.95.05", "--arch", "x86_64", "--python", "3.12"]


def test_check_says_that_a_release_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, *TOLD, "--checkpoint", "fp8-block"]) == 0
    assert capsys.readouterr().out == "vLLM 0.33.0 fits\nthe newest that fits is 0.33.0\n"


def test_check_says_what_it_assumed_and_what_it_did_not_judge(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(CHECK) == 0
    assert capsys.readouterr().out.splitlines() == [
        "vLLM 0.33.0 fits",
        "assumed: a block-FP8 checkpoint (--checkpoint other for BF16 or INT8), x86_64,"
        " Python 3.12",
        "not judged: driver, accelerator",
        "the newest that fits is 0.33.0",
    ]


def test_a_release_for_ascend_fits_another_checkpoint_than_the_assumed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ascend = ["vllm-ascend-0.23.0", "--platform", "openeuler-22.03", "--arch", "aarch64"]
    command = ["catalog", "check", *ascend, "--gpu", "ascend-910b"]
    assert main(command) == 1
    assert "--checkpoint other for BF16 or INT8" in capsys.readouterr().out
    assert main([*command, "--checkpoint", "other"]) == 0
    assert "--checkpoint" not in capsys.readouterr().out


def test_check_says_why_a_release_does_not_fit_and_which_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--platform", "kylin-v10", "--gpu", "a100-80g", "--pin", "pydantic==1.10.17"]
    assert main(["catalog", "check", "0.33.0", *arguments]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "vLLM 0.33.0 does not fit"
    kinds = [line.split(":")[0] for line in out[1:-1]]
    assert kinds == ["error", "error", "warning", "assumed", "not judged"]
    assert out[-1] == "nothing fits as it is; without pydantic==1.10.17 it would be 0.21.0"


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, "--driver", "535.104.05", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert {v["gate"] for v in report["verdicts"]} == {"driver", "driver-life"}
    assert report["not_judged"] == ["accelerator"]
    assert report["assumed"][1:] == ["x86_64", "Python 3.12"]


def test_json_may_stand_before_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "--json", *CHECK[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.parametrize(
    ("pin", "code"),
    [
        ("pydantic == 1.10.17", 1),
        ("pydantic[email]==1.10.17", 1),
        ("Pydantic==1.10.17", 1),
        ("vllm==0.6.3", 1),
        ("pydantic == 2.12.5", 0),
    ],
)
def test_a_pin_may_be_written_as_pip_reads_it(
    pin: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, "--pin", pin]) == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["catalog", "check", "0.34", "--platform", "ubuntu-22.04"], "release 0.34: unknown"),
        (["catalog", "check", "0.33.0", "--platform", "kylin-v9"], "--platform kylin-v9: unknown"),
        ([*CHECK, "--gpu", "h100"], "--gpu h100: unknown; known are h100-80g"),
        ([*CHECK, "--pin", "pydantic"], "--pin pydantic: expected NAME==VERSION"),
        ([*CHECK, "--pin", "pydantic>=2"], "--pin pydantic>=2: expected NAME==VERSION"),
        ([*CHECK, "--pin", "pydantic==2.*"], "--pin pydantic==2.*: expected NAME==VERSION"),
        ([*CHECK, "--pin", "pydantic==2.12,==2.13"], "--pin pydantic==2.12,==2.13: expected NAME"),
        ([*CHECK, "--pin", "a==1; extra == 'b'"], "--pin a==1; extra == 'b': expected NAME"),
        ([*CHECK, "--pin", "==1"], "--pin ==1: expected NAME==VERSION"),
        ([*CHECK, "--driver", "new"], "--driver new: expected a version"),
        ([*CHECK, "--driver", "1!5"], "--driver 1!5: expected a version"),
        ([*CHECK, "--driver", ""], "--driver : expected a version"),
        ([*CHECK, "--driver", "580.95.05rc1"], "--driver 580.95.05rc1: expected a version"),
        ([*CHECK, "--python", ""], "--python : expected a version"),
        ([*CHECK, "--python", "abc"], "--python abc: expected a version"),
    ],
)
def test_an_unknown_name_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    printed: Any = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1
