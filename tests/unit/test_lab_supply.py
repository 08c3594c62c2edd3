"""What the lab supplies to its hosts: Debian packages, wheels, conda, the tiny model."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.manifest import load_manifest
from lab import apt, conda, tiny_model, wheels
from lab.conda import Member

STUBS = (wheels.ENGINE_STUB, *wheels.STUBS)


# Debian packages


def _apt_config(scratch: Path, cache: Path) -> dict[str, str]:
    """The values that apt's options have."""
    words = apt.private_options(scratch, cache)
    assert set(words[::2]) == {"-o"}
    return dict(word.split("=", 1) for word in words[1::2])


def test_without_a_mirror_apt_has_its_own_state_and_the_machines_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8FLEET_LAB_DEBIAN", raising=False)
    config = _apt_config(tmp_path / "apt", tmp_path)
    assert config["Dir::State"] == str(tmp_path / "apt/state")
    assert Path(config["Dir::State::status"]).read_text() == ""
    assert not [name for name in config if name.startswith("Dir::Etc")]


def test_with_a_mirror_apt_sees_debian_12_there_and_nothing_of_the_machines_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8FLEET_LAB_DEBIAN", "http://mirror.test/debian/")
    monkeypatch.setattr(apt, "keyring", lambda mirror, cache: cache / "keys.gpg")
    config = _apt_config(tmp_path / "apt", tmp_path)
    assert Path(config["Dir::Etc::sourcelist"]).read_text() == (
        f"deb [signed-by={tmp_path}/keys.gpg] http://mirror.test/debian bookworm main\n"
    )
    for name in ("sourceparts", "preferences", "preferencesparts"):
        assert config[f"Dir::Etc::{name}"] == "/dev/null"


def test_debians_keys_are_taken_by_their_digest_and_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(apt, "run", lambda command: asked.append(list(command)))
    for _ in range(2):
        keys = apt.keyring("http://mirror.test/debian", tmp_path)
    fetch, unpack = asked
    assert fetch[-3].startswith("http://mirror.test/debian/pool/main/d/debian-archive-keyring/")
    assert re.fullmatch("SHA256:[0-9a-f]{64}", fetch[-1])
    assert unpack[0] == "dpkg-deb"
    assert keys.is_relative_to(tmp_path)


# Wheels


def test_a_stub_has_the_same_bytes_in_every_build_and_a_record_of_its_files() -> None:
    for stub in STUBS:
        content = stub.content()
        assert content == stub.content()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
            listed = [line.split(",")[0] for line in archive.read(record).decode().splitlines()]
            assert sorted(listed) == sorted(archive.namelist())


def test_the_engine_lock_names_every_stub_with_the_digest_of_its_bytes() -> None:
    locked = {entry.name: entry for entry in wheels.read_lock(wheels.ENGINE_LOCK)}
    for stub in STUBS:
        assert locked[stub.name].version == stub.version
        assert hashlib.sha256(stub.content()).hexdigest() in locked[stub.name].digests


def test_the_engine_lock_starts_with_the_engine_and_has_the_cpu_build_of_torch() -> None:
    locked = wheels.read_lock(wheels.ENGINE_LOCK)
    assert (locked[0].name, locked[0].version) == ("vllm", "0.32.0")
    assert {f"{entry.name}=={entry.version}" for entry in locked} >= {wheels.ENGINE, wheels.TORCH}


def test_the_tools_lock_has_what_a_host_runs_on() -> None:
    names = {entry.name for entry in wheels.read_lock(wheels.TOOLS_LOCK)}
    assert names >= {"pydantic", "requests", "rich", "safetensors", "uv"}


@pytest.mark.parametrize(
    "entry", ["requests", "requests>=2", "requests==2.34.2", "requests==2 --hash=sha256:abc"]
)
def test_a_lock_entry_without_version_or_whole_hash_is_refused(tmp_path: Path, entry: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# comment\n{entry}\n")
    with pytest.raises(OperatorError, match=r"lock\.txt: 'requests.* is not pinned"):
        wheels.read_lock(lock)


def test_a_lock_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"no such lock; make it with `python -m lab\.wheels"):
        wheels.read_lock(tmp_path / "lock.txt")


def _lock(folder: Path, **contents: bytes) -> Path:
    """A lock of one wheel to each name, at version 1."""
    lock = folder / "lock.txt"
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    lock.write_text(
        "".join(f"{name}==1 \\\n    --hash=sha256:{digest}\n" for name, digest in digests.items())
    )
    return lock


def _pip_that_must_not_run(*_: object) -> str:
    raise AssertionError("pip was called")


def test_wheels_that_are_there_already_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_run_pip", _pip_that_must_not_run)
    lock = _lock(tmp_path, a=b"wheel a", b=b"wheel b")
    for folder, name in (("wheels-old", "a"), ("wheels-interrupted.partial", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}-1-py3-none-any.whl").write_bytes(b"wheel " + name.encode())
    house = wheels.fetch(lock, tmp_path)
    assert sorted(file.name[0] for file in house.iterdir()) == ["a", "b"]
    assert wheels.fetch(lock, tmp_path) == house


def test_an_interrupted_wheelhouse_goes_on_and_loses_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pip(command: list[str], folder: Path, _progress: object) -> str:
        asked.extend((folder / "requirements").read_text().split()[::2])
        (folder / "b-1-py3-none-any.whl").write_bytes(b"wheel b")
        return ""

    lock = _lock(tmp_path, a=b"wheel a", b=b"wheel b")
    monkeypatch.setattr(wheels, "_run_pip", lambda *_: "ERROR: interrupted")
    with pytest.raises(CheckFailed):
        wheels.fetch(lock, tmp_path)
    partial = next(tmp_path.glob("wheels-*.partial"))
    (partial / "a-1-py3-none-any.whl").write_bytes(b"wheel a")
    (partial / "b-1-py3-none-any.whl").write_bytes(b"half a")
    (partial / "tmp123").mkdir()
    monkeypatch.setattr(wheels, "_run_pip", pip)
    house = wheels.fetch(lock, tmp_path)
    assert asked == ["b==1"]
    assert [(file.name[0], file.read_bytes()) for file in sorted(house.iterdir())] == [
        ("a", b"wheel a"),
        ("b", b"wheel b"),
    ]


def test_a_failed_download_names_the_packages_and_pips_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "Looking up\nERROR: No matching distribution found for a==1\n"
    monkeypatch.setattr(wheels, "_run_pip", lambda *_: log)
    with pytest.raises(CheckFailed, match=r"could not download a: ERROR: No matching distribution"):
        wheels.fetch(_lock(tmp_path, a=b"wheel a"), tmp_path)


def test_a_wheel_with_other_bytes_than_the_lock_says_makes_no_wheelhouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(_command: list[str], folder: Path, _progress: object) -> str:
        (folder / "a-1-py3-none-any.whl").write_bytes(b"other")
        return ""

    monkeypatch.setattr(wheels, "_run_pip", pip)
    with pytest.raises(CheckFailed, match="no wheel with a digest of the lock for a==1"):
        wheels.fetch(_lock(tmp_path, a=b"wheel a"), tmp_path)
    assert [path.suffix for path in tmp_path.glob("wheels-*")] == [".partial"]


def test_only_torch_is_looked_for_in_its_own_index_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, bool]] = []

    def pip(command: list[str], folder: Path, _progress: object) -> str:
        name = (folder / "requirements").read_text().split("==")[0]
        own_index = wheels.TORCH_INDEX in command
        tried.append((name, own_index))
        if name == "torch" and not own_index:
            return "ERROR: No matching distribution found"
        (folder / f"{name}-1-py3-none-any.whl").write_bytes(name.encode())
        return ""

    monkeypatch.setattr(wheels, "_run_pip", pip)
    wheels.fetch(_lock(tmp_path, numpy=b"numpy", torch=b"torch"), tmp_path)
    assert tried == [("torch", False), ("torch", True), ("numpy", False)]


# The conda installer and channel


def _installer(folder: Path) -> Path:
    program = Member("bin/conda", b"#!/bin/sh\necho conda 1\n", executable=True)
    installer = folder / "installer.sh"
    installer.write_bytes(conda.installer_bytes([program, Member("share/note", b"\x00\xff")]))
    return installer


def _install(installer: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(installer), *arguments], capture_output=True, text=True)


def test_the_installer_makes_a_prefix_with_a_working_conda(tmp_path: Path) -> None:
    prefix = tmp_path / "opt/frontend"
    done = _install(_installer(tmp_path), "-b", "-p", str(prefix))
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.check_output([str(prefix / "bin/conda")], text=True) == "conda 1\n"
    assert (prefix / "share/note").read_bytes() == b"\x00\xff"
    assert [path.name for path in prefix.parent.iterdir()] == ["frontend"]


def test_the_installer_takes_over_what_an_interrupted_run_left(tmp_path: Path) -> None:
    (tmp_path / "frontend.partial/bin/old").mkdir(parents=True)
    done = _install(_installer(tmp_path), "-b", "-p", str(tmp_path / "frontend"))
    assert done.returncode == 0
    assert [path.name for path in (tmp_path / "frontend/bin").iterdir()] == ["conda"]


def test_the_installer_refuses_a_prefix_that_exists(tmp_path: Path) -> None:
    done = _install(_installer(tmp_path), "-b", "-p", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"ERROR: File or directory already exists: '{tmp_path}'\n"


@pytest.mark.parametrize("arguments", [(), ("-b",), ("-p", "somewhere"), ("-x",)])
def test_the_installer_asks_for_its_two_options(tmp_path: Path, arguments: tuple[str]) -> None:
    done = _install(_installer(tmp_path), *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("usage: sh ")


def test_a_truncated_installer_says_so_and_installs_nothing(tmp_path: Path) -> None:
    installer = _installer(tmp_path)
    installer.write_bytes(installer.read_bytes()[:-20])
    done = _install(installer, "-b", "-p", str(tmp_path / "frontend"))
    assert done.returncode == 1
    assert "is damaged or incomplete: fetch it again" in done.stderr
    assert not list(tmp_path.glob("frontend*"))


def test_the_installer_has_the_same_bytes_in_every_build(tmp_path: Path) -> None:
    assert _installer(tmp_path).read_bytes() == _installer(tmp_path).read_bytes()


@pytest.mark.parametrize(
    ("recorded", "baked"),
    [
        ("/usr", conda.PLACEHOLDER),
        ("/usr/lib/x86_64-linux-gnu", f"{conda.PLACEHOLDER}/lib"),
        ("/usr/include/python3.11", f"{conda.PLACEHOLDER}/include/python3.11"),
        ("-L/usr/lib -O2", f"-L{conda.PLACEHOLDER}/lib -O2"),
        ("/usr/bin/install -c", "/usr/bin/install -c"),
        ("/usr/share/zoneinfo", "/usr/share/zoneinfo"),
        ("/build/usr/lib", "/build/usr/lib"),
        (1, 1),
    ],
)
def test_paths_of_the_interpreter_move_to_the_prefix_and_programs_stay(
    recorded: object, baked: object
) -> None:
    assert conda._in_prefix(recorded) == baked


def test_only_files_that_name_the_prefix_are_rewritten_on_installation() -> None:
    script = Member("bin/pip", f"#!{conda.PLACEHOLDER}/bin/python3.11\n".encode())
    assert conda._path_entry(script)["prefix_placeholder"] == conda.PLACEHOLDER
    assert "prefix_placeholder" not in conda._path_entry(Member("lib/x.py", b"x = 1\n"))


def test_a_python_of_another_form_is_refused_instead_of_left_unpatched(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    file.write_text('"site-packages"')
    with pytest.raises(CheckFailed, match=r"site\.py of this release's python3\.11 has 0 times"):
        conda._replace(file, b'"dist-packages"', b'"site-packages"')
    assert file.read_text() == '"site-packages"'


def test_the_frontend_names_a_folder_that_is_no_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.conda_frontend.__main__ import main

    (tmp_path / "file").touch()
    create = ["create", "-y", "-p", str(tmp_path), "--override-channels", "-c", "/none", "python"]
    for arguments in (["list", "-p", str(tmp_path)], create):
        assert main(arguments) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"CondaError: {tmp_path} is no conda environment",
        f"CondaError: {tmp_path} has files but is no conda environment",
    ]


# The model


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return tiny_model.model_files()


def test_the_model_is_what_the_committed_manifest_says(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tiny_model.build(tmp_path)
    manifest = load_manifest(tiny_model.COMMITTED / tiny_model.MANIFEST)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        file.path for file in manifest.files
    )
    for file in manifest.files:
        content = (folder / file.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
    for name in ("config.json", "generation_config.json"):
        assert (tiny_model.COMMITTED / name).read_bytes() == files[name]


def test_a_model_that_differs_from_its_manifest_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model, "CONTEXT", 4096)
    with pytest.raises(CheckFailed, match=r"manifest\.toml: .* makes other files"):
        tiny_model.build(tmp_path)
    assert not list(tmp_path.iterdir())


def _header(content: bytes) -> dict[str, dict[str, list[int]]]:
    (length,) = struct.unpack_from("<Q", content)
    header: dict[str, dict[str, list[int]]] = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    return header


def test_each_shard_is_covered_by_its_tensors_without_gap(files: dict[str, bytes]) -> None:
    shards = [content for name, content in files.items() if name.endswith(".safetensors")]
    assert len(shards) == 3
    for shard in shards:
        (length,) = struct.unpack_from("<Q", shard)
        end = 0
        for tensor in _header(shard).values():
            start, stop = tensor["data_offsets"]
            rows, *columns = tensor["shape"]
            assert (start, stop) == (end, end + 2 * rows * (columns or [1])[0])
            end = stop
        assert (len(shard), length % 8) == (8 + length + end, 0)


def test_the_index_places_every_tensor_in_the_shard_that_holds_it(files: dict[str, bytes]) -> None:
    index = json.loads(files["model.safetensors.index.json"])
    held = {
        tensor: name
        for name, content in files.items()
        if name.endswith(".safetensors")
        for tensor in _header(content)
    }
    assert index["weight_map"] == held


def test_the_head_lifts_syllables_and_no_other_token() -> None:
    head = tiny_model._head()
    row = 2 * tiny_model.HIDDEN
    lifted = [
        token
        for token in range(tiny_model.VOCABULARY)
        if head.content[token * row : token * row + 2] == tiny_model.ONE
    ]
    tokens = {v: k for k, v in _vocabulary().items()}
    assert len(lifted) == 100
    assert all(tokens[token].isascii() and tokens[token].isalpha() for token in lifted)
    assert not set(lifted) & {tiny_model.FIRST_SPECIAL + number for number in range(3)}


def _vocabulary() -> dict[str, int]:
    tokenizer = json.loads(tiny_model.model_files()["tokenizer.json"])
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    return vocabulary


def test_every_byte_has_a_token_and_every_token_a_row() -> None:
    vocabulary = _vocabulary()
    assert len(vocabulary) == 256 + 100 + 3 <= tiny_model.VOCABULARY
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
