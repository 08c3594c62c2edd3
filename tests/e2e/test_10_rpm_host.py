"""The RPM lab host: a Kylin V10 SP3 look-alike with dnf, from bare to served, rebooted.

The tests of this file follow each other on one host. Its engine has a package that only cmake
builds, and the host has no cmake.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import complete, serves
from cmake_project import proof, write_source
from fleet import REPO, RPM, Fleet, command, invocation, reboot, served_folder, ssh, until, url

from lab.site import site

pytestmark = pytest.mark.lab
CMAKE = "/opt/fp8fleet/cmake"


@pytest.fixture(scope="module")
def inventory(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The lab's inventory of one RPM host, with a package more in the engine's lock."""
    folder = tmp_path_factory.mktemp("sources")
    lock = tmp_path_factory.mktemp("lock") / "engine.txt"
    text = (REPO / "locks/vllm-0.32.0-cpu-x86_64.txt").read_text()
    lock.write_text(text + write_source(folder))
    with served_folder(folder) as links:
        yield fleet.inventory(
            hosts={
                RPM: {
                    "platform": "kylin-v10",
                    "engine_build": "source",
                    "dnf_repositories": [
                        {"name": "lab", "base_url": f"{site().mirror_url}/rpm", "gpgcheck": False}
                    ],
                }
            },
            engine_requirements=str(lock),
            package_find_links=[site().wheels_url, links],
        )


def test_a_bare_rpm_host_is_served_by_one_command(fleet: Fleet, inventory: str) -> None:
    command("fp8fleet", "lab", "destroy", RPM)
    created = command("fp8fleet", "lab", "create", RPM)
    assert created.code == 0, created.text
    bare = "command -v apt-get dpkg nginx curl g++ cmake || echo bare"
    assert ssh(RPM, bare) == "bare"
    assert ssh(RPM, "ip route show default") == ""
    assert 'ID="kylin"' in ssh(RPM, "cat /etc/os-release")
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    answer = complete(url(RPM))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].strip()
    assert ssh(RPM, "rpm -q --qf '%{NAME} ' nginx gcc-c++ numactl-libs") == (
        "nginx gcc-c++ numactl-libs"
    )


def test_a_package_that_needs_cmake_was_built_there_with_the_archives(inventory: str) -> None:
    assert ssh(RPM, proof()) == f"42 {CMAKE}/current/bin/cmake"
    assert ssh(RPM, "command -v cmake || echo none") == "none"


def test_a_second_run_on_it_changes_nothing(fleet: Fleet, inventory: str) -> None:
    done = fleet.full(inventory)
    assert (done.code, done.changed) == (0, []), done.text
    dry = json.loads(fleet.pyinfra(inventory, "--dry", "--json").out)["plan"]
    assert dry
    assert [op["name"] for op in dry if op["hosts_with_change"]] == []


def test_after_a_reboot_it_serves_again_by_itself(fleet: Fleet, inventory: str) -> None:
    reboot(RPM)
    until(lambda: serves(RPM), "a completion after the reboot")
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    # the proof of readiness and the warm-up are of one start
    assert done.changed == ["vLLM | Server 1"]


def archive_of(machine: bytes) -> bytes:
    """An archive as Kitware's whose program is for another machine (ELF's e_machine)."""
    program = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + machine + bytes(44)
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb") as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        entry = tarfile.TarInfo("cmake-3.28.4/bin/cmake")
        entry.size, entry.mode = len(program), 0o755
        archive.addfile(entry, io.BytesIO(program))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("content", "digest", "said"),
    [
        (archive_of(b"\xb7\x00"), None, "its bin/cmake is not for x86_64 (ELF machine b700)"),
        (archive_of(b"\x3e\x00"), "ab" * 32, f"expected SHA256 {'ab' * 32}, got "),
        (b"<!DOCTYPE html><html>log in</html>", "ab" * 32, ", an HTML page"),
    ],
    ids=["another architecture", "another digest", "a page"],
)
def test_a_bad_archive_is_refused_and_the_host_left_as_it_was(
    fleet: Fleet, inventory: str, tmp_path: Path, content: bytes, digest: str | None, said: str
) -> None:
    (tmp_path / "cmake-3.28.4.tar.gz").write_bytes(content)
    before = invocation(RPM, "tiny"), ssh(RPM, f"ls -l {CMAKE}")
    with served_folder(tmp_path) as folder:
        done = fleet.full(
            inventory,
            *("--data", f"cmake_archive_url={folder}cmake-3.28.4.tar.gz"),
            *("--data", f"cmake_sha256={digest or hashlib.sha256(content).hexdigest()}"),
        )
    assert done.code == 1, done.text
    assert "cmake_archive_url: " in done.text
    assert said in done.text
    assert "Traceback" not in done.text
    assert (invocation(RPM, "tiny"), ssh(RPM, f"ls -l {CMAKE}")) == before
