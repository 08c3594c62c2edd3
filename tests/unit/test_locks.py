"""Locks: every requirement pinned and hashed, read back exactly, made without an index's name."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from fleets import DIGEST, REPO, lock_text, refusal

from fp8fleet.errors import CheckFailed
from fp8fleet.locks import make_lock, normalise, pinned_part, read_lock

HASH = f"--hash=sha256:{DIGEST}"


def written(folder: Path, text: str) -> Path:
    path = folder / "lock.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_versions_are_read_by_normalised_name(tmp_path: Path) -> None:
    text = (
        f"A_b.C==1.0 \\\n    {HASH} \\\n    {HASH}\nuvicorn[standard]==2 {HASH}\nt==2+cu {HASH}\n"
    )
    lock = read_lock(written(tmp_path, text))
    assert lock.versions == {"a-b-c": "1.0", "uvicorn": "2", "t": "2+cu"}


@pytest.mark.parametrize("name", ["A-B", "a_b", "a.b", "a--b", "A._-b"])
def test_names_are_compared_as_indexes_compare_them(name: str) -> None:
    assert normalise(name) == "a-b"


def test_an_environment_marker_is_no_part_of_the_version(tmp_path: Path) -> None:
    lock = read_lock(written(tmp_path, f"a==1 ; python_version < '3.12' {HASH}\n"))
    assert lock.versions == {"a": "1"}


def test_comments_and_spaces_do_not_change_the_digest(tmp_path: Path) -> None:
    plain = read_lock(written(tmp_path, f"a==1 {HASH}\nb==2 {HASH}\n")).digest
    noisy = f"# header\n\na==1 \\\n      {HASH}   # via x\n\n   b==2   {HASH}\n# end\n"
    assert read_lock(written(tmp_path, noisy)).digest == plain
    assert len(plain) == 12


@pytest.mark.parametrize("text", [f"a==2 {HASH}\n", f"a==1 {HASH[:-1]}0\n", f"b==1 {HASH}\n"])
def test_another_version_hash_or_name_changes_the_digest(tmp_path: Path, text: str) -> None:
    plain = read_lock(written(tmp_path, f"a==1 {HASH}\n")).digest
    assert read_lock(written(tmp_path, text)).digest != plain


def test_a_requirement_without_a_hash_is_refused_with_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, lock_text(a="1") + "b==2\n")
    assert refusal(lambda: read_lock(path)) == f"{path}: b: has no hash: make the lock anew"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("a>=1", "a>=1"),
        ("a", "a"),
        ("a @ file:///x.whl", "a"),
        ("--index-url https://mirror.example.com/simple", "--index-url"),
        ("-r other.txt", "-r"),
        ("-e .", "-e"),
        ("https://mirror.example.com/x.whl", "https://mirror.example.com/x.whl"),
    ],
)
def test_a_line_that_pins_nothing_is_refused(tmp_path: Path, line: str, shown: str) -> None:
    path = written(tmp_path, f"{line} {HASH}\n")
    assert refusal(lambda: read_lock(path)).startswith(f"{path}: {shown}: not pinned by ==")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_lock_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    assert f"{path}: no requirements in it" in refusal(lambda: read_lock(path))


def test_a_missing_lock_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    assert refusal(lambda: read_lock(path)) == (
        f"{path}: no such lock; make it with: fp8fleet lock"
    )


def test_an_unreadable_lock_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "lock.txt"
    binary.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(lambda: read_lock(binary))
    assert "cannot be read" in refusal(lambda: read_lock(tmp_path))


def test_the_pinned_part_holds_the_pins_lines_with_their_hashes(tmp_path: Path) -> None:
    lock = read_lock(written(tmp_path, lock_text(Pydantic_Core="2", pydantic="1", vllm="3")))
    assert pinned_part(lock, ("pydantic_core==2",)) == f"Pydantic-Core==2 {HASH}\n"


def test_a_pin_with_another_version_than_the_lock_is_refused(tmp_path: Path) -> None:
    lock = read_lock(written(tmp_path, lock_text(pydantic="2.12.5")))
    message = refusal(lambda: pinned_part(lock, ("pydantic==1.10.17",)))
    assert "engine_pins = 'pydantic==1.10.17'" in message
    assert "has pydantic==2.12.5" in message
    assert "--pin pydantic==1.10.17" in message


def test_a_pin_that_the_lock_lacks_is_refused(tmp_path: Path) -> None:
    lock = read_lock(written(tmp_path, lock_text(vllm="1")))
    assert "does not have pydantic" in refusal(lambda: pinned_part(lock, ("pydantic==2",)))


@pytest.mark.parametrize("path", sorted((REPO / "locks").glob("vllm-*.txt")), ids=lambda p: p.stem)
def test_the_committed_engine_locks_are_whole(path: Path) -> None:
    lock = read_lock(path)
    assert lock.versions["vllm"] == path.stem.split("-")[1]
    assert "://" not in lock.text


@pytest.mark.parametrize("name", ["tools.txt", "dev.txt"])
def test_the_committed_environment_locks_are_whole(name: str) -> None:
    lock = read_lock(REPO / "locks" / name)
    assert lock.versions["pydantic"]
    assert "://" not in lock.text


@pytest.mark.parametrize(
    ("release", "platform", "message"),
    [
        ("9.9.9", "ubuntu-22.04", "release 9.9.9: unknown; known are 0.17.0"),
        ("0.33.0", "windows", "platform windows: unknown; known are anolis-23"),
    ],
)
def test_a_lock_for_what_the_catalogue_lacks_is_refused(
    tmp_path: Path, release: str, platform: str, message: str
) -> None:
    output = tmp_path / "lock.txt"
    assert message in refusal(
        lambda: make_lock(release, platform, "x86_64", "3.12", (), output, "wheel")
    )
    assert not output.exists()


@pytest.fixture
def local_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An index of one page and a folder of two wheels; no other index is asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "vllm", "0.33.0", "manylinux_2_28_x86_64", "pydantic>=2")
    wheel(folder, "pydantic", "2.12.5", "any")
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"file://{tmp_path}/index")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    return str(folder)


def wheel(folder: Path, name: str, version: str, tag: str, requirement: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requirement}\n" if requirement else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-{tag}.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n")
        archive.writestr(f"{info}/RECORD", "")


def test_a_lock_pins_and_hashes_everything_and_names_no_index(
    tmp_path: Path, local_wheels: str
) -> None:
    output = tmp_path / "new/lock.txt"
    make_lock("0.33.0", "ubuntu-22.04", "x86_64", "3.12", (), output, "wheel")
    lock = read_lock(output)
    assert lock.versions == {"vllm": "0.33.0", "pydantic": "2.12.5"}
    assert "://" not in lock.text
    assert local_wheels not in lock.text
    assert lock.text.startswith("# vLLM 0.33.0 for ubuntu-22.04 x86_64, Python 3.12; made by: fp8")
    for file in Path(local_wheels).iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() in lock.text
    assert [path.name for path in output.parent.iterdir()] == ["lock.txt"]


def test_a_release_of_a_plugin_is_named_by_itself_and_says_what_its_lock_needs(
    tmp_path: Path, local_wheels: str
) -> None:
    arguments = ("vllm-ascend-0.23.0", "openeuler-22.03", "aarch64", "3.11", ())
    with pytest.raises(CheckFailed) as caught:
        make_lock(*arguments, tmp_path / "lock.txt", "wheel")
    message = str(caught.value)
    assert message.startswith("vllm-ascend 0.23.0 does not resolve for openeuler-22.03 aarch64: ")
    assert "; vllm-ascend 0.23.0 needs: in the package index a vllm" in message
    assert "VLLM_TARGET_DEVICE=empty" in message
    assert "\n" not in message


def test_a_site_that_serves_what_the_plugin_needs_gets_its_lock(
    tmp_path: Path, local_wheels: str
) -> None:
    folder = Path(local_wheels)
    wheel(folder, "vllm", "0.23.0+empty", "any")
    wheel(folder, "vllm_ascend", "0.23.0", "manylinux_2_34_aarch64", "torch==2.10.0")
    wheel(folder, "torch", "2.10.0", "any")
    output = tmp_path / "lock.txt"
    arguments = ("vllm-ascend-0.23.0", "openeuler-22.03", "aarch64", "3.11", ())
    make_lock(*arguments, output, "wheel")
    lock = read_lock(output)
    assert lock.versions == {"vllm": "0.23.0+empty", "vllm-ascend": "0.23.0", "torch": "2.10.0"}
    assert lock.text.startswith("# vllm-ascend 0.23.0 for openeuler-22.03 aarch64, Python 3.11; ")
    assert lock.made_for == ("openeuler-22.03", "aarch64")


@pytest.mark.parametrize(
    ("platform", "arch", "pins"),
    [
        ("ubuntu-22.04", "x86_64", ("pydantic==1.10.17",)),
        ("ubuntu-22.04", "aarch64", ()),
    ],
)
def test_what_does_not_resolve_is_said_in_one_line_and_leaves_no_lock(
    tmp_path: Path, local_wheels: str, platform: str, arch: str, pins: tuple[str, ...]
) -> None:
    output = tmp_path / "lock.txt"
    output.write_text("the old lock")
    with pytest.raises(CheckFailed) as caught:
        make_lock("0.33.0", platform, arch, "3.12", pins, output, "wheel")
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert message.startswith(f"vLLM 0.33.0 does not resolve for {platform} {arch}: ")
    assert "\n" not in message
    assert output.read_text() == "the old lock"
