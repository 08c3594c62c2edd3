"""What a command does when its output fails, cannot show a letter, or when it is interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpd
import pytest

from fp8fleet.zipapp import build_zipapp

REPOSITORY = Path(__file__).resolve().parents[2]
HOST = f"{sys.executable} -m fp8fleet.hostcli"
CONTROL = f'{sys.executable} -c "from fp8fleet.entry import main; main()"'
NAME = "model.bin"
BODY = bytes(range(256)) * 2000


def shell(
    line: str, folder: Path, encoding: str = "utf-8:strict"
) -> subprocess.CompletedProcess[str]:
    """Run a line of bash as an operator types it; pipes fail where one of their commands does."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": encoding}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """In a shell's background this process ignores interrupts, and its children would too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with m.toml, whose source is ``source``, and ``m``, which is whole."""
    for name in ("source", "m"):
        (tmp_path / name).mkdir()
        (tmp_path / name / NAME).write_bytes(BODY)
    write_manifest(tmp_path / "m.toml", (tmp_path / "source").as_uri())
    return tmp_path


def write_manifest(path: Path, source: str) -> None:
    digest = hashlib.sha256(BODY).hexdigest()
    path.write_text(
        f'name = "m"\nrevision = "1"\nsources = ["{source}"]\n'
        f'[[files]]\npath = "{NAME}"\nsize = {len(BODY)}\nsha256 = "{digest}"\n'
    )


COMMANDS = ["verify m.toml m --full", "verify m.toml m --json", "manifest torrent m.toml m"]
COMMANDS += ["inspect m"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("start", [HOST, CONTROL])
def test_a_reader_that_left_is_no_traceback(model: Path, start: str, command: str) -> None:
    shown = shell(f"{start} {command} | true", model)
    assert shown.returncode in (0, 1, 2)
    assert "Traceback" not in shown.stderr
    assert "Exception" not in shown.stderr


@pytest.mark.parametrize("command", [*COMMANDS[:3], "--help"])
@pytest.mark.parametrize("start", [HOST, CONTROL])
def test_an_output_that_is_full_is_one_line(model: Path, start: str, command: str) -> None:
    shown = shell(f"{start} {command} >/dev/full", model)
    expected = "error: the output cannot be written: No space left on device\n"
    assert (shown.returncode, shown.stderr) == (1, expected)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_without_an_output_a_command_does_the_same(model: Path, closed: str) -> None:
    for command in (*COMMANDS[:3], "fetch m.toml new"):
        shown = shell(f"{HOST} {command} {closed}", model)
        assert (shown.returncode, shown.stderr) == (0, "")
    assert (model / "new" / NAME).read_bytes() == BODY
    (model / "m" / NAME).write_bytes(b"short")
    assert shell(f"{HOST} verify m.toml m {closed}", model).returncode == 1
    assert (model / "m" / NAME).read_bytes() == b"short"


def test_a_fetch_whose_output_is_full_goes_on(model: Path) -> None:
    shown = shell(f"{HOST} fetch m.toml new >/dev/full", model)
    assert (model / "new" / NAME).read_bytes() == BODY
    expected = "error: the output cannot be written: No space left on device\n"
    assert (shown.returncode, shown.stderr) == (1, expected)


def test_a_fetch_whose_reader_left_ends_and_the_next_one_resumes_it(model: Path) -> None:
    """So ends what a killed run left on a host: sshd closes its output and sends no signal."""
    with httpd.Server({NAME: BODY}) as server:
        server.always[NAME] = httpd.silent
        write_manifest(model / "m.toml", server.url)
        shown = shell(f"{HOST} fetch m.toml new | true", model)
        assert (shown.returncode, shown.stderr) == (
            130,
            "interrupted: run the same command again to go on\n",
        )
        del server.always[NAME]
        assert shell(f"{HOST} fetch m.toml new", model).returncode == 0
    assert (model / "new" / NAME).read_bytes() == BODY


def test_an_error_that_cannot_be_shown_is_an_exit_code(model: Path) -> None:
    assert shell(f"{HOST} verify none.toml m 2>/dev/full", model).returncode == 2


@pytest.mark.parametrize("start", [HOST, CONTROL])
def test_a_file_name_that_is_no_text_is_shown_escaped(model: Path, start: str) -> None:
    (model / "m" / os.fsdecode(b"\xff\x1b[31m\nerror: fake.bin")).write_bytes(b"x")
    shown = shell(f"{start} verify m.toml m", model)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[-2].startswith(
        r"warning: \udcff\x1b[31m\nerror: fake.bin is not in the manifest"
    )
    shown = shell(f"{start} verify m.toml m --json", model)
    assert json.loads(shown.stdout)["findings"][0]["file"].startswith("\udcff")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_a_path_in_any_script_is_shown_in_any_locale(model: Path, encoding: str) -> None:
    shutil.copy(model / "m.toml", model / "模型.toml")
    shown = shell(f"{HOST} manifest torrent 模型.toml m", model, encoding)
    assert (shown.returncode, shown.stderr) == (0, "")
    shown = shell(f"{HOST} verify 没有.toml m", model, encoding)
    expected = "没有.toml" if encoding.startswith("utf") else r"\u6ca1\u6709.toml"
    assert (shown.returncode, shown.stderr) == (2, f"error: {expected}: no such manifest\n")


# --- interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("control", [False, True])
def test_an_interrupt_does_not_wait_for_a_silent_server(model: Path, control: bool) -> None:
    host, entry = ["-m", "fp8fleet.hostcli"], "from fp8fleet.entry import main; main()"
    start = ["-c", entry] if control else host
    with httpd.Server({NAME: BODY}) as server:
        server.always[NAME] = httpd.silent
        write_manifest(model / "m.toml", server.url)
        process = subprocess.Popen(
            [sys.executable, *start, "fetch", "m.toml", "new"],
            cwd=model,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stderr=subprocess.PIPE,
            text=True,
        )
        while not server.requests:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        # The server stays silent until both have ended, and the stall limit is beyond this one.
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == "interrupted: run the same command again to go on\n"


def test_an_interrupt_while_the_command_loads_is_no_traceback(model: Path) -> None:
    """As the operator's, in the middle of an import."""
    loading = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'fp8fleet.hostcli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    archive = build_zipapp(model)
    for start in (
        "from fp8fleet.entry import main; main()",
        f"runpy.run_path({str(archive)!r}, run_name='__main__')",
    ):
        shown = subprocess.run(
            [sys.executable, "-c", loading + start, "verify", "m.toml", "m"],
            cwd=model,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (shown.returncode, shown.stderr) == (130, "")
