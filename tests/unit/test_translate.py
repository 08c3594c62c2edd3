"""Command lines of `vllm serve` become options of the inventory; what was wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8fleet.cli import main
from fp8fleet.errors import OperatorError
from fp8fleet.serve_options import Checkpoint
from fp8fleet.translate import translate

NEW = "0.33.0"
MODEL = "vllm serve /models/m"
GUIDE = """\
CUDA_VISIBLE_DEVICES=0,1 vllm serve /models/gemma-4-31b-fp8 \\
  --host 0.0.0.0 --port 8000 --api-key sk-VERYSECRET \\
  --tensor_parallel_size=2 \\
  --quantization fp8 --kv-cache-dtype fp16 --enforce-eager \\
  --rope-theta 500000 --swap-space 4 --dry-run \\
  --max-model-len 32k --max-num-seqs 64 --gpu-memory-utilization 1.5 \\
  --hf-overrides '{"rope_theta": 500000}' --disable-log-requests > vllm.log 2>&1 &
"""


def options_of(line: str, release: str = NEW) -> dict[str, Any]:
    done = translate(line, release)
    assert done.findings == []
    return done.options


def codes(line: str, release: str = NEW, checkpoint: Checkpoint | None = None) -> list[str]:
    return [finding.code for finding in translate(line, release, checkpoint).findings]


def test_the_guides_line_keeps_what_is_right_and_tells_each_wrong_part() -> None:
    done = translate(GUIDE, "0.23.0", Checkpoint("compressed-tensors-fp8-block", "bfloat16"))
    assert done.options == {"enforce-eager": True, "max-model-len": "32k", "max-num-seqs": 64}
    told = {finding.message.split(":")[0] for finding in done.findings}
    named = [
        "host", "port", "api-key", "tensor-parallel-size", "quantization", "kv-cache-dtype",
        "enforce-eager", "rope-theta", "swap-space", "dry-run", "gpu-memory-utilization",
        "hf-overrides", "disable-log-requests",
    ]  # fmt: skip
    assert told >= {f"option {name!r}" for name in named}
    assert len(done.findings) == len(named) + 2  # the variable and the redirection
    assert done.corrected
    assert "VERYSECRET" not in "".join(finding.line for finding in done.findings)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("--max-model-len 32768", {"max-model-len": 32768}),
        ("--max_model_len=32768", {"max-model-len": 32768}),
        ("--max-model-len -1", {"max-model-len": -1}),
        ("--max-model-len 32k", {"max-model-len": "32k"}),
        ("--gpu-memory-utilization .9", {"gpu-memory-utilization": 0.9}),
        ("--enable-prefix-caching", {"enable-prefix-caching": True}),
        ("--no-enable-prefix-caching", {"no-enable-prefix-caching": True}),
        ('--hf-overrides \'{"a": {"b": 1}}\'', {"hf-overrides": {"a": {"b": 1}}}),
        ("--allowed-origins '[\"*\"]'", {"allowed-origins": '["*"]'}),
        ("--lora-modules a=/x b=/y", {"lora-modules": ["a=/x", "b=/y"]}),
        ('-sc \'{"model": "d"}\'', {"speculative-config": {"model": "d"}}),
        ("-O3", {"optimization-level": "3"}),
        ("-O=3", {"optimization-level": "3"}),
        ("-O.mode=3", {"compilation-config": {"mode": 3}}),
        ("-cc.mode=3", {"compilation-config": {"mode": 3}}),
        ("-cc.cudagraph_mode=none", {"compilation-config": {"cudagraph_mode": "none"}}),
        (
            '--hf-overrides \'{"a": "\u3000\u201cx\u201d "}\'',
            {"hf-overrides": {"a": "\u3000\u201cx\u201d "}},
        ),
        (
            "--compilation-config.cudagraph_mode FULL --compilation-config.pass_config.y=1",
            {"compilation-config": {"cudagraph_mode": "FULL", "pass_config": {"y": 1}}},
        ),
        ("--chat-template '/a b/c.jinja'", {"chat-template": "/a b/c.jinja"}),
        ("\\\n  --max-num-seqs \\\r\n 8", {"max-num-seqs": 8}),
    ],
)
def test_what_is_right_is_taken_as_it_is(arguments: str, options: dict[str, Any]) -> None:
    assert options_of(f"{MODEL} {arguments}") == options


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m",
        "/opt/vllm/bin/vllm serve m",
        "exec vllm serve m",
        "python -m vllm.entrypoints.openai.api_server",
        "/usr/bin/python3.12 -m vllm.entrypoints.openai.api_server",
    ],
)
def test_every_way_to_start_the_server_is_known(command: str) -> None:
    assert options_of(f"{command} --max-num-seqs 8") == {"max-num-seqs": 8}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("--host ::", "service_address"),
        ("-tp 2", "tensor_parallel_size"),
        ("--served-model-name a b", "served_model_name"),
        ("--api_key=k", "api_key"),
        ("--hf-token k", "model_token"),
    ],
)
def test_what_the_inventory_owns_is_left_out_with_its_key(arguments: str, key: str) -> None:
    done = translate(f"{MODEL} {arguments} --seed 1", NEW)
    assert done.options == {"seed": 1}
    (finding,) = done.findings
    assert (finding.code, key in finding.remedy, done.corrected) == ("inventory", True, True)


@pytest.mark.parametrize(
    "line",
    [f"{MODEL} --seed 1", "vllm serve --model m --seed 1", f"{MODEL} --model=m2 --seed 1"],
)
def test_the_model_that_every_line_names_is_left_out_without_a_line(line: str) -> None:
    assert options_of(line) == {"seed": 1}


def test_a_variable_is_told_to_be_written_in_the_inventory_if_it_is_needed() -> None:
    (finding,) = translate(f"VLLM_USE_V1=1 {MODEL}", NEW).findings
    assert "VLLM_USE_V1" in finding.message
    assert finding.remedy == "write it in engine_environment if it is still needed"
    (finding,) = translate(f"CUDA_VISIBLE_DEVICES=1 {MODEL}", NEW).findings
    assert finding.remedy == "set the instances' devices"


@pytest.mark.parametrize(
    "option",
    ["--quantization fp8_per_tensor", "-q fp8_per_tensor", "--kv-cache-dtype bfloat16"],
)
def test_what_met_no_checkpoint_is_warned_of(option: str) -> None:
    (finding,) = translate(f"{MODEL} {option}", NEW).findings
    assert (finding.severity, finding.code) == ("warning", "not-judged")
    assert finding.message.endswith(": not judged against a checkpoint")
    assert finding.remedy == "name it with --model"
    assert translate(f"{MODEL} {option}", NEW, Checkpoint("none", "bfloat16")).findings == []


def test_json_that_lost_its_quotes_in_a_shell_is_left_out() -> None:
    done = translate(f"{MODEL} --hf-overrides {{rope_theta:500000}} --seed 1", NEW)
    assert done.options == {"seed": 1}
    assert "expected a map (JSON)" in done.findings[0].message


def test_a_release_without_a_table_says_that_little_was_judged() -> None:
    done = translate(f"{MODEL} --kv-cache-dtype fp16 --nonsense 3", "0.6.3")
    assert done.options == {"nonsense": "3"}
    assert [(finding.severity, finding.code) for finding in done.findings] == [
        ("error", "bad-value"), ("warning", "not-judged"), ("warning", "not-judged"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        f"export X=1\n{MODEL} --seed 1",
        f"source /opt/env && {MODEL}",
        f"cd /srv; {MODEL}",
        f"sudo -u vllm {MODEL}",
    ],
)
def test_what_stands_before_the_command_is_told(line: str) -> None:
    with pytest.raises(OperatorError, match="give only the line of `vllm serve MODEL"):
        translate(line, NEW)


@pytest.mark.parametrize(
    ("arguments", "code", "options"),
    [
        ("--gpu-memory-utilisation 0.9", "unknown-option", {"gpu-memory-utilization": 0.9}),
        ("--max-num-batched 8k", "abbreviated-option", {"max-num-batched-tokens": "8k"}),
        ("--nothing-like-it 3", "unknown-option", {}),
        ("--enforce-eagr", "unknown-option", {"enforce-eager": True}),
        ("--enable-prefix-caching=false", "bad-value", {"enable-prefix-caching": False}),
        ("--max-num-seqs 8 --max_num_seqs 9", "option-twice", {"max-num-seqs": 9}),
        ("--max-num-seqs", "bad-value", {}),
        ("--max-num-seqs --seed 1", "bad-value", {"seed": 1}),
        ("stray --seed 1", "stray-word", {"seed": 1}),
        ("-z 1", "unknown-option", {}),
        ("--seed 1 | tee log", "shell", {"seed": 1}),
    ],
)
def test_a_wrong_part_is_put_right_or_left_out(
    arguments: str, code: str, options: dict[str, Any]
) -> None:
    done = translate(f"{MODEL} {arguments}", NEW)
    assert done.options == options
    assert code in [finding.code for finding in done.findings]
    assert done.corrected


@pytest.mark.parametrize(
    ("line", "character", "options"),
    [
        (f"{MODEL} --max-model-len\uff1d32768", "U+FF1D", {"max-model-len": 32768}),
        (f"{MODEL} --max-model-len:32768", "U+003A", {"max-model-len": 32768}),
        (f"{MODEL} \u2014max-model-len 32768", "U+2014", {"max-model-len": 32768}),
        (f"{MODEL} \u2013\u2013max\u2013model\u2013len 32768", "U+2013", {"max-model-len": 32768}),
        (f"{MODEL} \uff0dcc.mode=3", "U+FF0D", {"compilation-config": {"mode": 3}}),
        (f"{MODEL} --max-model-len \u22121", "U+2212", {"max-model-len": -1}),
        (f"{MODEL} '--max-model-len 32768'", "U+0020", {"max-model-len": 32768}),
        (f"{MODEL} --max-model-len\u300032768", "U+3000", {"max-model-len": 32768}),
        ("vllm\u00a0serve\u00a0m --seed\u00a01", "U+00A0", {"seed": 1}),
        (f'{MODEL} --hf-overrides \u201c{{"a": 1}}\u201d', "U+201C", {"hf-overrides": {"a": 1}}),
        (f"{MODEL} --hf-overrides=\u2018{{\u201ca\u201d: 1}}\u2019", "U+2018",
         {"hf-overrides": {"a": 1}}),
    ],
)  # fmt: skip
def test_a_character_that_only_looks_right_is_named_and_put_right(
    line: str, character: str, options: dict[str, Any]
) -> None:
    done = translate(line, NEW)
    assert done.options == options
    (finding,) = done.findings
    assert finding.code == "wrong-character"
    assert character in finding.message


@pytest.mark.parametrize(
    ("tail", "options"),
    [
        ("--max-model-len 32768 > log.txt 2>&1 &", {"max-model-len": 32768}),
        ("--max-model-len 32768 | tee log", {"max-model-len": 32768}),
        ("--max-model-len 32768 < /dev/null", {"max-model-len": 32768}),
        ("--max-model-len 32768 2>log", {"max-model-len": 32768}),
        ("--max-model-len=32768>log", {"max-model-len": 32768}),
    ],
)
def test_only_a_number_that_touches_a_redirection_is_the_shells(
    tail: str, options: dict[str, Any]
) -> None:
    done = translate(f"nohup {MODEL} {tail}", NEW)
    assert done.options == options
    assert [finding.code for finding in done.findings] == ["shell"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (f"--hf-overrides{'.a' * 400} 1", "bad-value"),
        ("--limit-mm-per-prompt image=4 --limit-mm-per-prompt.image 4", "option-twice"),
        ("--middleware a --middleware b", "option-twice"),
        ("--cuda-graph-sizes 1 2 4", "unknown-option"),
    ],
)
def test_nothing_is_lost_without_a_word_and_nothing_told_twice(arguments: str, code: str) -> None:
    assert codes(f"{MODEL} {arguments}") == [code]


def test_of_values_that_vllm_would_all_use_the_lost_ones_are_told() -> None:
    (finding,) = translate(f"{MODEL} --middleware a --middleware b", NEW).findings
    assert "vLLM uses all of them" in finding.message


def test_what_takes_the_place_of_a_wrong_option_is_judged_too() -> None:
    done = translate(f"{MODEL} --gpu-memory-utilisation 1.5", NEW)
    assert [finding.code for finding in done.findings] == ["unknown-option", "bad-value"]
    assert done.options == {}


def test_false_is_written_so_that_an_older_release_reads_it() -> None:
    done = translate(f"{MODEL} --enable-prefix-caching=false", "0.23.0")
    assert done.options == {"no-enable-prefix-caching": True}


@pytest.mark.parametrize(
    "line",
    [
        f"{MODEL} --api-key S3CRET",
        f"{MODEL} --api-key=S3CRET",
        f"{MODEL} --api_key S3CRET S3CRET2",
        f"{MODEL} --api-k S3CRET",
        f"{MODEL} --apikey S3CRET",
        f"{MODEL} --hf-token S3CRET",
        f"VLLM_API_KEY=S3CRET HF_TOKEN=S3CRET {MODEL}",
        f"{MODEL} x S3CRET",
        f"{MODEL} --api-key 'S3CRET",
        f"{MODEL} -S3CRET%",
        f"{MODEL} --api-key\uff1dS3CRET",
        f"{MODEL} --api-key:S3CRET",
        f"{MODEL} --api-key\uff1aS3CRET",
        f"{MODEL} --api-key\uff0cS3CRET",
        f"{MODEL} --api-key\u3000S3CRET",
        f"{MODEL} --api-keyS3CRET",
        f"{MODEL} --api-key-S3CRET",
        f"{MODEL} --API-KEYS3CRET",
        f"{MODEL} --openai-api-keyS3CRET",
        f"{MODEL} '--api-key S3CRET'",
        f"{MODEL} --api-key\u2014S3CRET",
        f"{MODEL} \u2014api-key S3CRET",
        f"{MODEL} \u2014api-key=S3CRET",
        f"{MODEL} -api-key\uff1dS3CRET",
        f"{MODEL} --hf-token\uff1dS3CRET",
        f"{MODEL} --hf_token@S3CRET",
        f"{MODEL} --nothing-like-it\uff1dS3CRET",
        f"{MODEL} --api-key \u201cS3CRET\u201d",
    ],
)
def test_a_secret_is_never_repeated(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", line]) in (1, 2)
    captured = capsys.readouterr()
    assert "S3CRET" not in captured.out + captured.err
    assert captured.err


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "ls -l",
        "vllm",
        "vllm bench serve",
        "python -m http.server",
        "vllm serve 'open",
        "docker run --gpus all vllm/vllm-openai --model m",
        "\0",
        "A=1",
        "| vllm serve m",
    ],
)
def test_what_is_no_command_line_of_the_server_is_refused(line: str) -> None:
    with pytest.raises(OperatorError, match="vllm serve MODEL") as refusal:
        translate(line, NEW)
    assert refusal.value.exit_code == 2


# The command


def test_the_yaml_stands_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", GUIDE, "--release", "0.23.0"]) == 1
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["max-num-seqs"] == 64
    assert all(line.startswith(("error: ", "warning: ")) for line in captured.err.splitlines())


def test_nothing_to_correct_is_exit_code_0_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", f"{MODEL} --max-num-seqs 8"]) == 0
    captured = capsys.readouterr()
    assert (yaml.safe_load(captured.out), captured.err) == ({"max-num-seqs": 8}, "")


def test_a_warning_corrects_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", f"{MODEL} --enforce-eager"]) == 0
    assert capsys.readouterr().err.startswith("warning: option 'enforce-eager'")


def test_a_named_model_is_judged_by_its_stored_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    digest = "0" * 64
    (folder / "manifest.toml").write_text(
        'name = "m"\nrevision = "1"\n[[files]]\npath = "config.json"\nsize = 2\n'
        f'sha256 = "{digest}"\n'
    )
    (folder / "config.json").write_text(
        '{"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8",'
        ' "weight_block_size": [128, 128]}}'
    )
    monkeypatch.chdir(tmp_path)
    line = f"{MODEL} --quantization compressed-tensors"
    assert main(["translate", line, "--model", "m"]) == 1
    assert "contradicts the checkpoint, which is fp8-block" in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    assert main(["translate", line, "--model", "m"]) == 2
    assert "models/m/config.json: is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--release", "9.9"], "--release 9.9: unknown; known are "),
        (["--model", "nope"], "models/nope/manifest.toml: no such manifest"),
        (["--model", "../x"], "--model '../x': it becomes a directory's name"),
    ],
)
def test_an_unknown_release_or_model_is_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", MODEL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1
