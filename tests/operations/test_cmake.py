"""cmake from an archive: real archives, unpacked by the commands in a real shell."""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RecordedHost, asked, commands, context, host_plan, lines, program, run
from pyinfra.api import FunctionCommand

from fp8fleet.plan import CmakePlan
from roles import operations as common
from roles.cmake.facts import Cmake, CmakeState
from roles.cmake.operations import ELF_MACHINES, cmake
from roles.conda.operations import engine_environment
from roles.facts import PathState, PathStates

HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(HERE, "x86_64")
NOTHING = CmakeState(None, None, False, False)
PROGRAM = "cmake-3.28.4-linux/bin/cmake"

pytestmark = pytest.mark.skipif(HERE not in ELF_MACHINES, reason=f"no archive is for {HERE}")


def packed(*members: tuple[str, bytes]) -> bytes:
    """A gzipped tar of programs, by name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def runnable() -> bytes:
    """A program of this machine that knows --version."""
    return Path(shutil.which("true") or "/bin/true").read_bytes()


def for_machine(architecture: str) -> bytes:
    """This machine's program, said to be for another one (and so one that does not run)."""
    content = bytearray(runnable())
    content[18:20] = bytes.fromhex(ELF_MACHINES[architecture])
    return bytes(content)


class Host:
    """A host's install directory below ``folder``, and the archive that its plan names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "opt/cmake"
        self.offer(packed((PROGRAM, runnable()), ("cmake-3.28.4-linux/share/x", b"x")))

    def offer(self, archive: bytes, digest: str | None = None) -> None:
        """Plan for this archive."""
        (self.folder / "archive").write_bytes(archive)
        self.digest = digest or hashlib.sha256(archive).hexdigest()

    @property
    def plan(self) -> CmakePlan:
        return CmakePlan(
            minimum="3.26.1",
            link=f"{self.directory}/current",
            architecture=HERE,
            prefix=f"{self.directory}/3.28.4-{self.digest[:12]}",
            url=f"file://{self.folder}/archive",
            sha256=self.digest,
        )

    def apply(self) -> tuple[int, str]:
        """Run the operation here; returns the number of commands and what the failed one said."""
        found = commands(
            cmake,
            {Cmake: lambda **arguments: replace(asked(Cmake, **arguments), own=None)},
            plan=host_plan(cmake=self.plan, download_environment={}),
        )
        for command in found:
            result = run(command)
            if result.returncode:
                return len(found), result.stderr
        return len(found), ""

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(common, "WORK_LOCK", str(tmp_path / "lock"))
    return Host(tmp_path)


def test_a_host_on_which_nothing_is_built_is_not_even_asked() -> None:
    assert lines(cmake, {}, plan=host_plan(cmake=None)) == []


@pytest.mark.parametrize("own", ["3.26.1", "3.28.3", "4.0.2", "3.100.0"])
def test_a_host_whose_own_cmake_will_do_keeps_it(host: Host, own: str) -> None:
    facts = {Cmake: replace(NOTHING, own=own)}
    assert lines(cmake, facts, plan=host_plan(cmake=host.plan)) == []


@pytest.mark.parametrize("own", [None, "2.8.12", "3.9.0", "3.26.0"])
def test_an_older_or_missing_one_is_not_enough(host: Host, own: str | None) -> None:
    facts = {Cmake: replace(NOTHING, own=own)}
    assert lines(cmake, facts, plan=host_plan(cmake=host.plan))


def test_the_archive_is_installed_to_a_prefix_of_its_own_and_linked_once(host: Host) -> None:
    assert host.apply()[1] == ""
    prefix = Path(host.plan.prefix or "")
    assert host.entries() == [prefix.name, "current"]
    assert (host.directory / "current").readlink() == prefix
    assert run(f"{host.plan.link}/bin/cmake --version").returncode == 0
    assert (prefix / "share/x").read_bytes() == b"x"
    assert host.apply() == (0, "")


def test_what_a_killed_run_left_is_thrown_away(host: Host) -> None:
    prefix = Path(host.plan.prefix or "")
    (host.directory / f"{prefix.name}.new/bin").mkdir(parents=True)
    (host.directory / f"{prefix.name}.new/bin/old").touch()
    (host.directory / f"{prefix.name}.download").write_bytes(b"half")
    assert host.apply()[1] == ""
    assert host.entries() == [prefix.name, "current"]
    assert not (prefix / "bin/old").exists()


def test_a_run_killed_before_the_link_only_links(host: Host) -> None:
    host.apply()
    (host.directory / "current").unlink()
    assert host.apply() == (1, "")
    assert (host.directory / "current").exists()


def test_another_archive_moves_the_link_and_leaves_the_old_prefix(host: Host) -> None:
    host.apply()
    old = host.plan.prefix
    host.offer(packed((PROGRAM, runnable()), ("cmake-3.28.4-linux/share/y", b"y")))
    assert host.apply()[1] == ""
    assert (host.directory / "current").readlink() == Path(host.plan.prefix or "")
    assert Path(old or "").is_dir()


@pytest.mark.parametrize(
    ("archive", "digest", "said"),
    [
        (lambda: packed((PROGRAM, runnable())), "ab" * 32, f"expected SHA256 {'ab' * 32}, got "),
        (lambda: b"<!DOCTYPE HTML>\n<p>log in", "ab" * 32, ", an HTML page"),
        (lambda: b"<html>log in</html>", None, "is no archive of cmake that tar can unpack here"),
        (lambda: packed((PROGRAM, runnable()))[:-400], None, "is no archive of cmake that tar"),
        (lambda: packed(("cmake/share/x", b"x")), None, "is no archive of cmake that tar"),
        (
            lambda: packed((PROGRAM, for_machine(OTHER))),
            None,
            f"its bin/cmake is not for {HERE} (ELF machine {ELF_MACHINES.get(OTHER)}): take",
        ),
        (lambda: packed((PROGRAM, b"#!/bin/sh\n")), None, f"its bin/cmake is not for {HERE}"),
        (lambda: packed((PROGRAM, runnable()[:64])), None, "its bin/cmake does not run here"),
    ],
    ids=[
        "another digest", "a page", "a page with its digest", "truncated", "no cmake in it",
        "another architecture", "a script", "a broken program",
    ],
)  # fmt: skip
def test_a_bad_archive_is_refused_in_one_line_and_leaves_all_as_it_was(
    host: Host, archive: Callable[[], bytes], digest: str | None, said: str
) -> None:
    host.apply()
    before = host.entries()
    host.offer(archive(), digest)
    message = host.apply()[1].strip().splitlines()[-1]
    assert message.startswith("cmake_archive_url: ")
    assert said in message
    assert host.entries() == before
    assert (host.directory / "current/bin/cmake").exists()


def refusal(plan: CmakePlan, state: CmakeState) -> str:
    """What the operator reads when the operation ends with one line and no command."""
    recorded = RecordedHost({Cmake: state})
    with context(recorded) as run_state:
        (command,) = cmake._inner(plan=host_plan(cmake=plan))
        assert isinstance(command, FunctionCommand)
        assert command.function(run_state, recorded) is False
    return recorded.said[0]


@pytest.mark.parametrize(("own", "have"), [(None, "has none"), ("3.16.5", "has 3.16.5")])
def test_without_an_archive_the_missing_keys_are_named(
    host: Host, own: str | None, have: str
) -> None:
    plan = replace(host.plan, prefix=None, url=None, sha256=None)
    message = refusal(plan, replace(NOTHING, own=own))
    assert message == (
        "engine_build = 'source' needs cmake 3.26.1 or newer, the host "
        f"{have}: set cmake_archive_url and cmake_sha256, or install one"
    )


def test_what_an_operator_put_in_the_links_place_is_reported_and_left(host: Host) -> None:
    host.directory.mkdir(parents=True)
    (host.directory / "current").mkdir()
    state = asked(Cmake, link=host.plan.link, prefix=host.plan.prefix)
    message = refusal(host.plan, replace(state, own=None))
    assert message.startswith(f"{host.plan.link} is no link of fp8fleet: move it away")


# Cmake


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cmake version 3.25.1", "3.25.1"),
        ("cmake version 3.20.0-rc1", "3.20.0"),
        ("cmake3 version 3.17.5", "3.17.5"),
        ("cmake: error while loading shared libraries", None),
    ],
)
def test_the_hosts_own_version_is_read_from_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, version: str | None
) -> None:
    program(tmp_path, "cmake", f"echo '{line}'; echo; echo 'CMake suite, version 9.9'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert asked(Cmake, link=f"{tmp_path}/no", prefix=None).own == version


def test_a_host_without_cmake_has_none(tmp_path: Path) -> None:
    command = str(Cmake().command(link=f"{tmp_path}/no", prefix=f"{tmp_path}/no"))
    result = run(command, env={"PATH": str(tmp_path)})
    assert result.returncode == 0
    assert Cmake().process([]) == Cmake.default() == NOTHING


# Its use


def test_a_source_build_finds_the_archives_cmake_first() -> None:
    plan = host_plan(cmake=CmakePlan("3.26.1", "/opt/f/cmake/current", "x86_64"))
    half: Any = {PathStates: {"/x": PathState("absent")}}
    found = [
        line for line in lines(engine_environment, half, plan=plan) if "uv pip install" in line
    ]
    assert found
    for line in found:
        assert 'PATH=/opt/f/cmake/current/bin:"$PATH" ' in line
