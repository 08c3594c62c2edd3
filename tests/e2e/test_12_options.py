"""The committed tables of options against the parser of the engine that a lab host has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import MAIN, ssh

from fp8fleet.serve_options import judge

pytestmark = pytest.mark.lab

ENGINE = "0.32.0"
RENDERED = "/etc/fp8fleet/instances/tiny.yaml"
TAKEN: list[dict[str, Any]] = [
    {"max-model-len": "32k", "gpu-memory-utilization": 0.5, "seed": 0},
    {"enable-prefix-caching": False, "enforce-eager": True},
    {"hf-overrides": {"max_position_embeddings": 4096}},
    {"allowed-origins": '["*"]', "lora-modules": ["a=/x", "b=/y"]},
]
REFUSED: list[dict[str, Any]] = [
    {"rope-theta": 500000},
    {"swap-space": 4},
    {"disable-log-requests": True},
    {"dtype": "fp8"},
    {"max-num-seqs": "many"},
    {"max-model-len": "32q"},
    {"enforce-eager": "yes"},
    {"allowed-origins": ["*"]},
]


def test_the_installed_parser_takes_and_refuses_what_the_table_says(served: None) -> None:
    files = {f"/tmp/options-{n}.yaml": options for n, options in enumerate([*TAKEN, *REFUSED])}
    for path, options in files.items():
        ssh(MAIN, f"printf %s {shlex.quote(yaml.safe_dump(options))} >{path}")
    start = ssh(MAIN, "systemctl show -P ExecStart fp8fleet-tiny.service")
    python = start.partition("path=")[2].partition("/bin/vllm")[0] + "/bin/python"
    program = Path(__file__).with_name("installed_parser.py").read_text()
    paths = " ".join([RENDERED, *files])
    variables = "VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR"
    run = f"{variables} {python} - {paths} <<'END'\n{program}\nEND"
    codes = dict(line.split() for line in ssh(MAIN, run).splitlines() if line.startswith("/"))
    assert codes[RENDERED] == "0"
    for path, options in files.items():
        refused = any(finding.severity == "error" for finding in judge(ENGINE, options))
        assert (codes[path] != "0") == refused == (options in REFUSED), options
