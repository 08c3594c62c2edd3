"""The file that hosts run: always the same bytes, and enough to run alone."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from checkpoints import Model

from fp8fleet.zipapp import build_zipapp, zipapp_bytes, zipapp_digest, zipapp_name

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_name_is_known_without_building_and_carries_the_digest(tmp_path: Path) -> None:
    path = build_zipapp(tmp_path / "new")
    assert path.name == zipapp_name() == f"fp8fleet-{zipapp_digest()[:12]}.pyz"
    assert path.read_bytes() == zipapp_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_another_process_builds_the_same_bytes() -> None:
    code = "from fp8fleet.zipapp import zipapp_digest; print(zipapp_digest())"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == zipapp_digest()


def test_it_holds_sources_only_sorted_and_without_dates() -> None:
    with zipfile.ZipFile(io.BytesIO(zipapp_bytes())) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}


def test_it_runs_alone_and_needs_no_deploy_library(tmp_path: Path) -> None:
    """pyinfra is hidden: a host's tools environment does not have it."""
    path = build_zipapp(tmp_path)
    code = (
        "import runpy, sys; sys.modules['pyinfra'] = None\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    for command in ("fetch", "verify", "inspect", "seed", "manifest torrent", "ready"):
        line = [str(path), *command.split(), "--help"]
        arguments = [sys.executable, "-I", "-c", code, *line]
        shown = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        assert f"usage: fp8fleet {command}" in shown.stdout


def test_a_bad_manifest_ends_it_with_2_and_one_line(tmp_path: Path) -> None:
    path = build_zipapp(tmp_path)
    arguments = [sys.executable, "-I", str(path), "verify", "none.toml", "."]
    shown = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (2, "error: none.toml: no such manifest\n")


def test_it_inspects_a_model_and_notes_the_pass(tmp_path: Path) -> None:
    """The note depends on the rules' sources, which are read out of the archive."""
    model = Model(tmp_path / "m").write()
    lines = ['name = "m"', 'revision = "1"']
    for file in model.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lines += ["[[files]]", f'path = "{file.name}"', f"size = {file.stat().st_size}"]
        lines.append(f'sha256 = "{digest}"')
    (tmp_path / "m.toml").write_text("\n".join(lines))
    path = build_zipapp(tmp_path)
    arguments = [sys.executable, "-I", str(path), "inspect", "m", "--manifest", "m.toml"]
    for outcome in ("m: whole", "m: whole, as inspected before"):
        shown = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.splitlines()[-1] == outcome
