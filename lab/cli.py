"""The ``lab`` part of the command line."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8fleet.catalog import platforms
from fp8fleet.errors import OperatorError
from lab import apt, hosts, image, machine, mirror, network
from lab.processes import say
from lab.site import (
    MIRROR_URL,
    LabHost,
    Site,
    cache_dir,
    forget_site,
    host,
    locked,
    named,
    site,
    write_site,
)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``lab`` and its commands; each sets ``func``, which takes the parsed arguments.

    Args:
        subparsers: where the fp8fleet command collects its subcommands.
    """
    lab = subparsers.add_parser("lab", help="real hosts on this machine, for demos and tests")
    commands = lab.add_subparsers(required=True, metavar="COMMAND")
    up = _command(commands, "up", _up, "bring the lab up, or complete it")
    up.add_argument("--hosts", type=int, metavar="N", help="at least lab-1 to lab-N (default: 1)")
    _command(commands, "down", _down, "stop everything; the hosts' disks stay")
    status = _command(commands, "status", _status, "say what runs; exit code 1 unless all does")
    status.add_argument("--json", action="store_true", help="for programs")
    ssh = _command(commands, "ssh", _ssh, "open a shell on a host, or run a command there")
    ssh.add_argument("host", metavar="HOST", help="lab-1, lab-2, ...")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    destroy = _command(commands, "destroy", _destroy, "stop a host and throw its disk away")
    destroy.add_argument("host", metavar="HOST")
    create = _command(commands, "create", _create, "make a host with a fresh disk")
    create.add_argument("host", metavar="HOST")


def wanted_hosts(
    count: int | None, listed: Sequence[LabHost], with_disk: Sequence[LabHost]
) -> list[LabHost]:
    """Return the hosts that ``lab up`` brings up, by number.

    Args:
        count: how many hosts were asked for; None is no wish.
        listed: the hosts of the lab that is up, which stay.
        with_disk: the hosts that have a disk, which a lab that is down starts with.
    """
    if count is None:
        chosen = [*(listed or with_disk or [host(1)])]
    else:
        chosen = [*listed, *map(host, range(1, count + 1))]
    return hosts.in_order({one.name for one in chosen})


def _command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    handler: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(func=handler)
    return parser


def _up(asked: argparse.Namespace) -> int:
    if asked.hosts is not None:
        host(asked.hosts)  # refuses a number that cannot be
    machine.install_tools()
    with locked():
        wanted = wanted_hosts(asked.hosts, _listed(), hosts.existing())
        folders = _supplies(cache_dir())
        network.up()
        mirror.up(folders)
        hosts.up(wanted)
        write_site(_offer(wanted, folders))
    say(f"the lab is up: {', '.join(f'{one.name} {one.address}' for one in wanted)}")
    return 0


def _supplies(cache: Path) -> dict[str, Path]:
    """Build what the mirror serves, each part once a machine: place on the mirror and its path."""
    # Imported here: only `lab up` needs the packages that these are built with.
    from lab import conda, tiny_model, wheels

    frontend = conda.build_frontend(cache)
    return {
        "debian": apt.build_repository(cache, image.build_base(cache), _host_packages()),
        f"frontend/{frontend.name}": frontend,
        "conda": conda.build_channel(cache),
        "wheels": wheels.build_wheelhouse(cache),
        "models/tiny-llama": tiny_model.build(cache),
    }


def _host_packages() -> list[str]:
    """All that a Debian host of any kind installs."""
    debian = platforms()["debian-12"]
    names = (debian.packages, debian.serving_packages, debian.proxy_packages)
    return [*(name for part in names for name in part), debian.time_package]


def _offer(wanted: Sequence[LabHost], folders: dict[str, Path]) -> Site:
    place = next(place for place in folders if place.startswith("frontend/"))
    return Site(
        hosts=tuple(wanted),
        mirror_url=MIRROR_URL,
        frontend_url=f"{MIRROR_URL}/{place}",
        frontend_sha256=hashlib.sha256(folders[place].read_bytes()).hexdigest(),
        channel_url=f"{MIRROR_URL}/conda",
        wheels_url=f"{MIRROR_URL}/wheels/",
        models_url=f"{MIRROR_URL}/models",
        debian_url=f"{MIRROR_URL}/debian",
    )


def _down(asked: argparse.Namespace) -> int:
    _need_root()
    with locked():
        forget_site()
        mirror.down()
        hosts.down()
        network.down()
    return 0


def _status(asked: argparse.Namespace) -> int:
    _need_root()
    states = hosts.status(hosts.in_order({one.name for one in (*_listed(), *hosts.existing())}))
    parts = {"bridge": network.is_up(), "mirror": mirror.is_up()}
    whole = all(parts.values()) and bool(states) and all(s.state == "running" for s in states)
    if asked.json:
        print(json.dumps({"up": whole, **parts, "hosts": [asdict(state) for state in states]}))
        return 0 if whole else 1
    table = Table("part", "address", "state", box=None)
    for part, address in (("bridge", ""), ("mirror", MIRROR_URL)):
        table.add_row(part, address, "running" if parts[part] else "stopped")
    for state in states:
        table.add_row(state.name, state.address, state.state)
    Console().print(table)
    return 0 if whole else 1


def _ssh(asked: argparse.Namespace) -> int:
    _need_root()
    state = hosts.status([named(asked.host)])[0].state
    if state != "running":
        raise OperatorError(f"{asked.host} does not run ({state}): run fp8fleet lab up")
    return subprocess.run(hosts.ssh_command(asked.host, *asked.command)).returncode


def _destroy(asked: argparse.Namespace) -> int:
    _need_root()
    with locked():
        hosts.destroy(asked.host)
        if asked.host in {one.name for one in _listed()}:
            offer = site()
            left = tuple(one for one in offer.hosts if one.name != asked.host)
            write_site(offer.model_copy(update={"hosts": left}))
    say(f"{asked.host}: gone")
    return 0


def _create(asked: argparse.Namespace) -> int:
    _need_root()
    with locked():
        offer = site()
        hosts.create(asked.host)
        listed = hosts.in_order({one.name for one in (*offer.hosts, named(asked.host))})
        write_site(offer.model_copy(update={"hosts": tuple(listed)}))
    return 0


def _listed() -> tuple[LabHost, ...]:
    """Return the hosts of the lab that is up, none when it is not."""
    try:
        return site().hosts
    except OperatorError:
        return ()


def _need_root() -> None:
    if os.geteuid() != 0:
        raise OperatorError("the lab needs root: run this as root or with sudo")
