"""The fp8fleet command: plan, render, lock; one line for what is wrong, exit 0, 1 or 2."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fleets import DIGEST, INSTANCE, PROD, REPO, Ran, Site, fp8fleet

from fp8fleet.cli import RENDERED, main

SECRET = "sk-live-5ecre7"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the project's root, as an operator is."""
    monkeypatch.chdir(REPO)


def one_line_refusal(ran: Ran) -> str:
    """The line on stderr of a command that refused its input."""
    assert ran.code == 2
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("error: ")
    return lines[0]


# plan


def test_plan_prints_every_host(project: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PROD]) == 0
    out = capsys.readouterr().out
    for text in (
        "gpu-h100-1",
        "gpu-kylin-1  kylin-v10",
        "/opt/fp8fleet/engines/0.33.0-",
        "http://10.30.0.11:8001",
        "devices 4,5,6,7",
        "max-model-len=2048",
        "http://10.20.0.2:8080 -> 10.30.0.11:8000",
    ):
        assert text in out


def test_plan_says_nothing_on_stderr() -> None:
    ran = fp8fleet("plan", PROD, "--limit", "gw-1")
    assert (ran.code, ran.err) == (0, "")


def test_plan_of_one_host_prints_that_host(
    project: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", PROD, "--limit", "gw-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gw-1")
    assert "engine" not in out


@pytest.mark.parametrize(
    ("limits", "hosts"),
    [
        (["h100"], ["gpu-h100-1", "gpu-h100-2"]),
        (["gpu-*"], ["gpu-h100-1", "gpu-h100-2", "gpu-a100-1", "gpu-kylin-1"]),
        (["gw-1", "kylin"], ["gw-1", "gpu-kylin-1"]),
        (["h100", "gpu-h100-1"], ["gpu-h100-1", "gpu-h100-2"]),
        ([], ["gpu-h100-1", "gpu-h100-2", "gpu-a100-1", "gpu-kylin-1", "gw-1"]),
    ],
)
def test_limit_selects_output_by_host_group_and_wildcard(
    project: None, capsys: pytest.CaptureFixture[str], limits: list[str], hosts: list[str]
) -> None:
    assert main(["plan", PROD, *[word for limit in limits for word in ("--limit", limit)]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == hosts


def test_limit_does_not_change_what_is_planned(
    project: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", PROD, "--json"])
    whole = json.loads(capsys.readouterr().out)["hosts"]
    main(["plan", PROD, "--json", "--limit", "gw-1"])
    part = json.loads(capsys.readouterr().out)["hosts"]
    assert part == {"gw-1": whole["gw-1"]}


def test_plan_in_json_holds_no_contents_but_their_digests(
    project: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", PROD, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["inventory"] == PROD
    host = plan["hosts"]["gpu-h100-1"]
    assert host["instances"][0]["options"]["tensor-parallel-size"] == 4
    for file in host["files"]:
        assert set(file) == {"role", "path", "mode", "owner", "group", "bytes", "sha256"}
        assert len(file["sha256"]) == 64


def test_a_note_is_part_of_the_plan(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site.root)
    site.file("locks/engine.txt", f"vllm==0.6.3 --hash=sha256:{DIGEST}\n")
    site.serving["engine_release"] = "0.6.3"
    assert main(["plan", site.inventory()]) == 0
    assert "vLLM 0.6.3 has no --shutdown-timeout" in capsys.readouterr().out


def plan_lines(site: Site, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `fp8fleet plan` prints of a site, each row's label and text parted by one space."""
    assert main(["plan", site.inventory()]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_plan_names_the_packages_that_are_installed_only_where_something_is_absent(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site.root)
    site.file("locks/engine.txt", f"vllm==0.21.0 --hash=sha256:{DIGEST}\n")
    url = "https://mirror.example.com/NVIDIA-Linux-x86_64-580.95.05.run"
    driver = {"name": "nvidia", "version": "580.95.05", "source": url, "sha256": DIGEST}
    site.serving |= {"platform": "kylin-v10", "engine_release": "0.21.0", "drivers": [driver]}
    lines = plan_lines(site, capsys)
    assert "if absent chrony (where no time service runs)" in lines
    assert lines[lines.index(f"driver nvidia {url}") + 1] == (
        "if absent gcc make kernel-devel-$(uname -r)"
    )


def test_plan_says_which_cmake_a_source_build_gets(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site.root)
    assert not [line for line in plan_lines(site, capsys) if line.startswith("cmake")]
    site.serving["engine_build"] = "source"
    assert (
        "cmake 3.26.1 or newer: the host's own, else no archive is named (cmake_archive_url)"
        in plan_lines(site, capsys)
    )
    url = "https://mirror.example.com/cmake-3.28.4-linux-x86_64.tar.gz"
    site.serving |= {"cmake_archive_url": url, "cmake_sha256": DIGEST}
    assert f"cmake 3.26.1 or newer: the host's own, else {url}" in plan_lines(site, capsys)


def test_a_limit_that_matches_nothing_is_refused_with_the_hosts_there_are() -> None:
    line = one_line_refusal(fp8fleet("plan", PROD, "--limit", "gpu-h100-9"))
    assert "--limit gpu-h100-9: matches no host of inventories/prod.py" in line
    assert "gpu-h100-1" in line


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["render", PROD], ["nonsense"], ["plan", "-x"]]
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: fp8fleet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", PROD, "--js"],
        ["plan", PROD, "--lim=gw-1"],
        ["render", PROD, "--out", "x", "--dat=a=b"],
        ["lock", "0.33.0", "--platform", "ubuntu-22.04", "--pyth=3.12"],
        ["fetch", "manifest.toml", "models", "--prox=http://p"],
        ["lab", "up", "--host=1"],
        ["lab", "status", "--js"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_options_are_not_abbreviated(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {arguments[-1]}" in capsys.readouterr().err


# What bad input gets, on a real command line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine_relase": "0.33.0"}, "engine_relase: unknown key; did you mean engine_release?"),
        ({"conda_frontend_sha256": "ab" * 33}, "64 hex digits, this has 66 characters"),
        (
            {"instances": [{**INSTANCE, "tensor_parallel_size": 2}]},
            "tensor_parallel_size 2 needs as many devices, 1 are listed",
        ),
        ({"nginx_listen": 8000}, "port 8000 is used twice: by instance main and by nginx_listen"),
        ({"engine_release": "9.9.9"}, "unknown release; the catalogue has:"),
        ({"engine_requirements": "locks/none.txt"}, "locks/none.txt: no such lock"),
        ({"model_manifest": "models/none.toml"}, "models/none.toml: no such manifest"),
        ({"engine_pins": ["pydantic==2.14.0"]}, "has pydantic==2.12.5"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "render"])
def test_a_wrong_inventory_gets_one_line_and_exit_code_2(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    change: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(site.root)
    site.serving |= change
    extra = ["--out", "out"] if command == "render" else []
    code = main([command, site.inventory(), *extra])
    printed = capsys.readouterr()
    line = one_line_refusal(Ran(code, printed.out, printed.err))
    assert said in line
    assert "site.py: " in line
    assert not (site.root / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serving = [\n", "SyntaxError"),
        ("raise RuntimeError('boom')\n", "RuntimeError: boom"),
        ("", "no hosts"),
        ("serving = ['gpu-1']\nquux = [1, 2]\n", "gpu-1"),
    ],
)
def test_a_broken_inventory_gets_one_line_and_no_traceback(
    site: Site, text: str, said: str
) -> None:
    site.serving = {}
    line = one_line_refusal(fp8fleet("plan", site.inventory(text), cwd=site.root))
    assert said in line


def test_a_missing_inventory_gets_one_line() -> None:
    line = one_line_refusal(fp8fleet("plan", "inventories/nothing.py"))
    assert line == "error: inventories/nothing.py: no such inventory file"


def test_a_pasted_secret_is_not_repeated() -> None:
    line = one_line_refusal(fp8fleet("plan", PROD, "--data", f"api_key={SECRET}"))
    assert "--data: api_key: expected env:VARIABLE or file:/absolute/path" in line
    assert SECRET not in line


# Secrets


def test_plan_and_render_need_no_secret_and_print_placeholders(
    project: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FP8FLEET_API_KEY", raising=False)
    assert main(["plan", PROD]) == 0
    assert main(["plan", PROD, "--json"]) == 0
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "gpu-h100-1/etc/fp8fleet/instances/left.env").read_text()
    assert 'VLLM_API_KEY="<secret FP8FLEET_API_KEY>"' in text


def test_a_secret_that_is_there_appears_in_no_output(
    project: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FP8FLEET_API_KEY", SECRET)
    assert main(["plan", PROD]) == 0
    assert main(["plan", PROD, "--json"]) == 0
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


# render


def test_render_writes_every_file_where_it_lands(
    project: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    hosts = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert hosts == ["gpu-a100-1", "gpu-h100-1", "gpu-h100-2", "gpu-kylin-1", "gw-1"]
    files = [path for host in hosts for path in (tmp_path / host).rglob("*") if path.is_file()]
    assert capsys.readouterr().out == f"{len(files)} files of 5 hosts in {tmp_path}\n"
    assert (tmp_path / "gw-1/etc/nginx/nginx.conf").is_file()
    assert (tmp_path / "gpu-h100-1/etc/systemd/system/fp8fleet-left.service").is_file()


def test_rendered_files_have_their_modes(project: None, tmp_path: Path) -> None:
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    folder = tmp_path / "gpu-h100-1/etc/fp8fleet/instances"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes["left.env"] == modes["left.key"] == 0o600
    assert modes["left.yaml"] == 0o644


def test_rendering_again_gives_the_same_bytes(project: None, tmp_path: Path) -> None:
    def tree() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    first = tree()
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    assert tree() == first


def test_what_an_earlier_rendering_left_is_gone_after_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site.root)
    out = Path("new/out")
    site.hosts = {"gpu-1": {"nginx_listen": 81}, "gpu-2": {"nginx_listen": 82}}
    assert main(["render", site.inventory(), "--out", str(out)]) == 0
    assert (out / "gpu-2/etc/nginx/nginx.conf").is_file()
    (out / "gpu-1/added").touch()
    del site.hosts["gpu-2"]
    assert main(["render", site.inventory(), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [RENDERED, "gpu-1"]
    assert not (out / "gpu-1/added").exists()


@pytest.mark.parametrize("content", ["notes.txt", ".hidden", "folder/x", "gw-1/etc/nginx.conf"])
def test_a_folder_that_holds_what_render_did_not_write_is_refused_and_left(
    project: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    kept = tmp_path / content
    kept.parent.mkdir(exist_ok=True, parents=True)
    kept.write_text("kept")
    assert main(["render", PROD, "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    line = one_line_refusal(Ran(2, printed.out, printed.err))
    assert line == f"error: --out {tmp_path}: not empty and not written by render: name another"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == "kept"


def test_a_wrong_inventory_leaves_the_earlier_rendering(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site.root)
    assert main(["render", site.inventory(), "--out", "out"]) == 0
    before = sorted(Path("out").rglob("*"))
    site.serving["engine_release"] = "9.9.9"
    assert main(["render", site.inventory(), "--out", "out"]) == 2
    assert sorted(Path("out").rglob("*")) == before


def test_a_rendered_tool_is_a_program_that_runs(project: None, tmp_path: Path) -> None:
    assert main(["render", PROD, "--out", str(tmp_path)]) == 0
    (program,) = (tmp_path / "gw-1/opt/fp8fleet/bin").iterdir()
    assert zipfile.is_zipfile(program)
    run = subprocess.run(
        [sys.executable, str(program), "--help"], capture_output=True, text=True, check=True
    )
    assert "fetch" in run.stdout


def test_an_output_that_cannot_be_written_is_refused(
    project: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["render", PROD, "--out", str(file)]) == 2
    assert f"error: --out {file}: cannot be written" in capsys.readouterr().err


# lock


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["9.9.9", "--platform", "ubuntu-22.04"], "release 9.9.9: unknown"),
        (["0.33.0", "--platform", "windows"], "platform windows: unknown"),
    ],
)
def test_lock_refuses_what_the_catalogue_lacks(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", *arguments, "--output", str(tmp_path / "x.txt")]) == 2
    assert said in capsys.readouterr().err


def test_lock_refuses_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lock", "0.33.0", "--platform", "ubuntu-22.04", "--arch", "riscv64"])
    assert ended.value.code == 2
    assert "riscv64" in capsys.readouterr().err


# Interruptions


def test_an_interrupt_ends_with_130_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8fleet.cli.load_fleet", interrupt)
    assert main(["plan", PROD]) == 130
    assert "run the same command again" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback() -> None:
    start = "import sys; from fp8fleet.cli import main; sys.exit(main())"
    plan = subprocess.Popen(
        [sys.executable, "-c", start, "plan", PROD, "--json"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert plan.stdout
    assert plan.stderr
    plan.stdout.close()
    said = plan.stderr.read().decode()
    plan.wait(timeout=60)
    plan.stderr.close()
    assert said == ""
    assert plan.returncode == 1


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_reader_that_takes_one_line_gets_it_and_no_trace(options: str) -> None:
    start = "import sys; from fp8fleet.cli import main; sys.exit(main())"
    piped = f'"$0" -c "{start}" plan {PROD} {options} | head -1'
    run = subprocess.run(
        ["sh", "-c", piped, sys.executable], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr == ""
