"""Models on hosts: inspected before a server may start, shared between hosts."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from clients import complete
from faults import BAD, source
from fleet import MAIN, OTHER, REPO, Fleet, command, invocation, ssh, url

from lab.site import mirror_log, mirror_root, named

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("served")]
FOLDER = mirror_root() / "models/tiny-llama"


def without_a_tensor(folder: Path) -> str:
    """Take the last tensor out of a shard, header and data; returns its name."""
    shard = folder / BAD
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    last = max(tensors, key=lambda name: tensors[name]["data_offsets"][1])
    cut = header.pop(last)["data_offsets"][0]
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    data = content[8 + length : 8 + length + cut]
    shard.write_bytes(len(new).to_bytes(8, "little") + new + data)
    return str(last)


def test_a_checkpoint_that_is_not_whole_never_reaches_a_server(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Every file is as its manifest says: only the inspection can see that a tensor is missing."""
    broken = tmp_path / "broken"
    shutil.copytree(FOLDER, broken)
    tensor = without_a_tensor(broken)
    manifest = tmp_path / "manifest.toml"
    lines = ['name = "broken"', 'revision = "1"', 'quantization = "none"', "sources = []"]
    for file in sorted(path for path in broken.iterdir() if not path.name.startswith(".")):
        lines += ["[[files]]", f'path = "{file.name}"', f"size = {file.stat().st_size}"]
        lines.append(f'sha256 = "{hashlib.sha256(file.read_bytes()).hexdigest()}"')
    manifest.write_text("\n".join(lines) + "\n")
    before = invocation(MAIN, "tiny")
    with source(broken, "none") as (base, _):
        done = fleet.full(fleet.inventory(model_manifest=str(manifest), model_sources=[base]))
    assert done.code == 1, done.text
    assert tensor in done.text
    assert "Traceback" not in done.text
    assert invocation(MAIN, "tiny") == before
    assert complete(url(MAIN)).status_code == 200


def shared_manifest(folder: Path) -> str:
    """The tiny model's manifest with a torrent beside it."""
    shutil.copytree(REPO / "models/tiny-llama", folder)
    manifest = str(folder / "manifest.toml")
    made = command("fp8fleet", "manifest", "torrent", manifest, str(FOLDER))
    assert made.code == 0, made.text
    return manifest


def test_a_host_gives_its_model_to_the_others_on_its_storage_address_only(
    fleet: Fleet, tmp_path: Path
) -> None:
    hosts = {name: {"storage_address": named(name).address} for name in (MAIN, OTHER)}
    inventory = fleet.inventory(
        hosts=hosts,
        model_manifest=shared_manifest(tmp_path / "shared"),
        model_directory="/var/lib/fp8fleet/shared",
    )
    done = fleet.full(inventory, "--limit", MAIN)
    assert done.code == 0, done.text
    assert complete(url(MAIN)).status_code == 200
    listening = ssh(MAIN, "ss -Hltn 'sport = :6881'").split("\n")
    assert len(listening) == 1
    assert listening[0].split()[3].split("%")[0].split(":")[0] == named(MAIN).address
    again = fleet.full(inventory, "--limit", MAIN)
    assert (again.code, again.changed) == (0, []), again.text
    back = fleet.full(fleet.inventory())
    assert back.code == 0, back.text
    assert ssh(MAIN, "ls /etc/systemd/system/ | grep -c peer || true") == "0"
    assert ssh(MAIN, "ss -Hltn 'sport = :6881'") == ""


@pytest.mark.long
def test_two_hosts_cost_the_source_about_one_copy(fleet: Fleet, tmp_path: Path) -> None:
    command("fp8fleet", "lab", "create", OTHER)
    hosts = {name: {"storage_address": named(name).address} for name in (MAIN, OTHER)}
    base = fleet.full(fleet.inventory(hosts={MAIN: {}, OTHER: {}}))
    assert base.code == 0, base.text
    before = mirror_log().read_text().count("\n")
    inventory = fleet.inventory(
        hosts=hosts,
        model_manifest=shared_manifest(tmp_path / "shared"),
        model_directory="/var/lib/fp8fleet/shared",
    )
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    lines = mirror_log().read_text().splitlines()[before:]
    sent = sum(int(line.split()[5]) for line in lines if "/models/tiny-llama/model-0" in line)
    weights = sum(path.stat().st_size for path in FOLDER.glob("*.safetensors"))
    assert sent <= 1.2 * weights + 20_000, f"{sent} bytes of {weights}"
