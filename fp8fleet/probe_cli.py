"""`fp8fleet probe`: what hosts are, as group data to paste into an inventory."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.state import BaseStateCallback
from pyinfra.context import ctx_host, ctx_state

from fp8fleet import catalog
from fp8fleet.catalog_check import Target, is_version, newest_fitting
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.inventory import (
    check_connection,
    check_key,
    parse_data,
    read_inventory,
    sudo_password,
)
from fp8fleet.preflight.facts import HostFacts, parts_of, probe_arguments, read_facts
from fp8fleet.preflight.report import plain
from fp8fleet.session import hand_sudo_password, quiet_ssh
from fp8fleet.spec import HostSpec
from fp8fleet.topology import Topology, is_direct, plain_text

ARCHITECTURES: tuple[str, ...] = get_args(HostSpec.model_fields["arch"].annotation)

PATHS = ("/opt", "/var/lib", "/var/cache")
"""Where the default directories lie."""


Failure = Literal["no answer from", "known_hosts has no key of", "commands cannot run as root on"]
"""Why a host gave no facts."""

NO_ANSWER: Failure = "no answer from"
NO_HOST_KEY: Failure = "known_hosts has no key of"
NO_ROOT: Failure = "commands cannot run as root on"

_REMEDIES: dict[Failure, str] = {
    NO_ANSWER: "try `ssh {port}{login}{address} true`",
    NO_HOST_KEY: "`ssh-keyscan {port}-t ed25519 {address} >>{known_hosts}`, and compare its"
    " fingerprint (`ssh-keygen -lf {known_hosts}`) with what the host's console shows",
    NO_ROOT: "set sudo_password (env:NAME, file:PATH) where sudo asks for one, or leave _sudo out",
}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``probe`` to a command line."""
    parser = subparsers.add_parser("probe", help="read hosts and print group data to paste")
    parser.add_argument(
        "hosts",
        metavar="HOST|INVENTORY",
        help="a host as SSH knows it ([USER@]NAME), or a .py file",
    )
    parser.add_argument(
        "--limit", action="append", default=[], metavar="HOST", help="host or group"
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="KEY=VALUE", help="as pyinfra's --data"
    )
    parser.add_argument(
        "--topology",
        type=Path,
        metavar="DIR",
        help="write DIR/HOST.txt, the link matrix, for each kind of host",
    )
    parser.add_argument("--json", action="store_true", help="the facts, for programs")
    parser.set_defaults(func=_probe)


def _probe(arguments: argparse.Namespace) -> int:
    inventory = _inventory(arguments.hosts, parse_data(arguments.data))
    names = _limited(inventory, arguments.limit)
    _check(arguments.hosts, inventory, names)
    facts, failed = read_hosts(inventory, names)
    if arguments.topology:
        _write_matrices(facts, arguments.topology)
    if arguments.json:
        plain_facts = {name: plain(dataclasses.asdict(found)) for name, found in facts.items()}
        print(json.dumps(plain_facts, indent=1))
    elif facts:
        print("\n".join(group_data(facts, arguments.topology)))
    if failed:
        raise CheckFailed("; ".join(_reasons(failed, inventory)))
    return 0


def _reasons(failed: Mapping[str, Failure], inventory: Inventory) -> Iterator[str]:
    """One text for each kind of failure, with what to type for the first host."""
    for why, remedy in _REMEDIES.items():
        names = [name for name, failure in failed.items() if failure == why]
        if names:
            first = _ssh_words(inventory.get_host(names[0]))
            yield f"{why} {', '.join(names)}: {remedy.format_map(first)}"


def _ssh_words(host: Any) -> dict[str, str]:
    """How SSH reaches a host, as words of a shell command."""
    user, port = host.data.get("ssh_user"), host.data.get("ssh_port") or 22
    return {
        "port": f"-p {port} " if port != 22 else "",
        "login": f"{user}@" if user else "",
        "address": host.data.get("ssh_hostname") or host.name,
        "known_hosts": host.data.get("ssh_known_hosts_file") or "~/.ssh/known_hosts",
    }


def _inventory(hosts: str, data: dict[str, Any]) -> Inventory:
    if hosts.endswith(".py") or Path(hosts).is_file():
        return read_inventory(hosts, data, [])
    user, at, name = hosts.rpartition("@")
    if (at and not user) or not _is_host(name):
        raise OperatorError(
            f"{hosts}: expected [USER@]HOST or an inventory file (.py){_hint(user + at, name)}"
        )
    if at:
        data = {"ssh_user": user, **data}
    # pyinfra itself would write an unknown key to known_hosts and go on
    return Inventory(([name], {"ssh_strict_host_key_checking": "yes"}), override_data=data)


def _is_host(name: str) -> bool:
    """Whether SSH may know a host by ``name``, an address or a name."""
    return _is_address(name) or re.fullmatch(r"\w[\w.-]*", name) is not None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hint(login: str, name: str) -> str:
    """What to write in place of a port behind the host, or of an address in brackets."""
    match = re.fullmatch(
        r"\[(?P<in>[^\[\]]*)\](:(?P<port>\d{1,5}))?|(?P<plain>[^:]*):(?P<digits>\d{1,5})", name
    )
    if match is None:
        return ""
    host, port = match["in"] or match["plain"], match["port"] or match["digits"]
    if not host or not _is_host(host):
        return ""
    return f": write {login}{host}" + (f" --data ssh_port={int(port)}" if port else "")


def _check(path: str, inventory: Inventory, names: Iterable[str]) -> None:
    """Refuse what cannot be meant, before anything connects.

    Raises:
        OperatorError: a wrong key or value of a connection, an unknown key of the command line.
    """
    for key in inventory.get_override_data():
        check_key(key)
    for name in names:
        host = inventory.get_host(name)
        check_connection(path, inventory, host)
        hand_sudo_password(host, sudo_password(path, inventory, host))


def _limited(inventory: Inventory, limit: Iterable[str]) -> list[str]:
    entries = list(limit)
    hosts = list(inventory)
    chosen = [h.name for h in hosts if h.name in entries or set(h.groups) & set(entries)]
    if entries and not chosen:
        names = ", ".join(host.name for host in hosts)
        raise OperatorError(f"--limit {' '.join(entries)}: matches no host; there are: {names}")
    return chosen if entries else [host.name for host in hosts]


def read_hosts(
    inventory: Inventory, names: Iterable[str]
) -> tuple[dict[str, HostFacts], dict[str, Failure]]:
    """Probe hosts over pyinfra's connections; nothing is changed on them.

    Returns:
        The facts by host, and why the other hosts gave none.
    """
    from roles.preflight.facts import probe

    quiet_ssh()
    wanted = list(names)
    state = State(inventory, Config())
    facts: dict[str, HostFacts] = {}
    failed: dict[str, Failure] = {}
    _note_unknown_keys(state, failed)
    with ctx_state.use(state):
        state.limit_hosts = [host for host in inventory if host.name in wanted]
        try:
            connect_all(state)
        except PyinfraError:
            return {}, {name: failed.get(name, NO_ANSWER) for name in wanted}
        try:
            for host in list(state.active_hosts):
                sudo = bool(host.data.get("_sudo"))
                command = probe_arguments(full=True, need_root=sudo, paths=PATHS)
                with ctx_host.use(host):
                    parts = parts_of(probe(command, sudo))
                if parts is not None and "time" in parts:
                    facts[host.name] = read_facts(parts)
                elif parts is not None:
                    failed[host.name] = NO_ROOT
        finally:
            disconnect_all(state)
    ordered = {name: facts[name] for name in wanted if name in facts}
    return ordered, {n: failed.get(n, NO_ANSWER) for n in wanted if n not in facts}


def _note_unknown_keys(state: State, failed: dict[str, Failure]) -> None:
    """Put the hosts into ``failed`` that are refused since known_hosts lacks their key."""

    class WithoutKey(BaseStateCallback):  # type: ignore[misc]  # pyinfra is not typed
        @staticmethod
        def host_connect_error(state: State, host: Any, error: ConnectError) -> None:
            address = re.escape(_ssh_words(host)["address"])  # it may be a bastion's key, too
            if re.search(rf"No host key for \[?{address}[\] ]", str(error)):
                failed[host.name] = NO_HOST_KEY

    state.add_callback_handler(WithoutKey())


def _kinds(facts: dict[str, HostFacts]) -> list[list[str]]:
    """Names of the hosts, those with equal keys and equal matrices together."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for name, found in facts.items():
        kinds[tuple(_keys(found)), found.accelerators.topology].append(name)
    return list(kinds.values())


def _matrix_path(folder: Path, host: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.txt"


def _write_matrices(facts: dict[str, HostFacts], folder: Path) -> None:
    for names in _kinds(facts):
        cards = facts[names[0]].accelerators
        if cards.topology is None:
            continue
        lines = [plain_text(line).rstrip() for line in cards.matrix]
        split = [f"GPU{device.index}" for device in cards.devices if device.mig]
        lines += [f"MIG enabled: {' '.join(split)}"] if split else []
        path = _matrix_path(folder, names[0])
        beside = path.with_suffix(".new")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise OperatorError(f"--topology {folder}: cannot be written: {error}") from None


def group_data(facts: dict[str, HostFacts], folder: Path | None = None) -> Iterator[str]:
    """Lines of Python: one block for each kind of host, what is no key as a comment.

    Args:
        facts: by host.
        folder: where the matrices were written; None: nowhere.
    """
    for names in _kinds(facts):
        yield f"# {', '.join(names)}"
        yield from _keys(facts[names[0]])
        yield from _device_keys(facts[names[0]], _matrix_path(folder, names[0]) if folder else None)
        for name in names:
            prefix = f"# {name}: " if len(names) > 1 else "# "
            yield from (prefix + line for line in _remarks(facts[name]))
        yield ""


def _keys(facts: HostFacts) -> Iterator[str]:
    system = facts.system
    platform = catalog.platform_of(system.os_id, system.version_id, system.id_like)
    if platform:
        yield f"platform = {_text(platform)}"
    else:
        yield f"# platform: {system.os_id} {system.version_id} is not in the catalogue"
    if system.architecture in ARCHITECTURES:
        yield f"arch = {_text(system.architecture)}"
    else:
        yield f"# arch: {system.architecture or 'not told'}, expected {' or '.join(ARCHITECTURES)}"
    cards = _cards(facts)
    accelerator = _accelerator(cards)
    if accelerator is None:
        yield f"# accelerator: {_listed(cards)}; a host has one of the catalogue"
        yield "# engine_release: depends on the accelerator (`fp8fleet catalog check`)"
        return
    yield f"accelerator = {_text(accelerator)}"
    if len(cards) > 1:
        yield f"# cards: {_listed(cards)}"
    release = _release(facts, platform, accelerator)
    if release:
        yield f"engine_release = {_text(release)}"
    elif platform:
        yield "# engine_release: none of the catalogue fits (`fp8fleet catalog check` says why)"


def _device_keys(facts: HostFacts, matrix: Path | None) -> Iterator[str]:
    cards = facts.accelerators
    if not cards.devices:
        return
    ids = {device.slot: device.id for device in cards.pci}
    shown = Counter(_card(ids[device.slot]) for device in cards.devices if device.slot in ids)
    if len(shown) > 1:
        yield f"# device_count: the driver shows {_listed(shown)}: list each server's devices"
        return
    yield f"device_count = {len(cards.devices)}"
    if matrix and cards.topology:
        yield f"topology = {_text(matrix.as_posix())}"
    elif matrix:
        yield "# topology: the host prints no whole matrix"
    elif cards.topology and (pairs := _pairs(cards.topology)):
        yield f"device_pairs = {json.dumps(pairs)}"


def _pairs(topology: Topology) -> list[list[int]]:
    """Devices that are linked directly two by two; none where more of them are."""
    partners = [
        [other for other, link in enumerate(row) if is_direct(link)] for row in topology.links
    ]
    if any(len(others) > 1 for others in partners):
        return []
    return [[index, *others] for index, others in enumerate(partners) if others > [index]]


def _text(value: str) -> str:
    return json.dumps(value)


def _card(pci_id: str) -> str:
    """The catalogue's name of a card, or its PCI id."""
    return catalog.accelerator_of(pci_id) or f"of PCI id {pci_id}"


def _cards(facts: HostFacts) -> Counter[str]:
    """Number of cards on the PCI bus by kind; display cards of these vendors are among them."""
    return Counter(
        _card(device.id)
        for device in facts.accelerators.pci
        if not device.is_switch and device.id.startswith(("10de:", "19e5:d"))
    )


def _listed(cards: Counter[str]) -> str:
    """Such as ``2 h200-141g, 1 of PCI id ..., which the catalogue lacks``."""
    known = catalog.accelerators()
    return ", ".join(
        f"{count} {kind}" + ("" if kind in known else ", which the catalogue lacks")
        for kind, count in cards.most_common()
    )


def _accelerator(cards: Counter[str]) -> str | None:
    """The only kind of card that the catalogue knows; None: it knows none of them, or several."""
    if not cards:
        return "cpu"
    kinds = cards.keys() & catalog.accelerators().keys()
    return kinds.pop() if len(kinds) == 1 else None


def _release(facts: HostFacts, platform: str | None, accelerator: str) -> str | None:
    if platform is None or facts.system.architecture not in ARCHITECTURES:
        return None
    driver = next((device.driver for device in facts.accelerators.devices), None)
    vendor = catalog.accelerators()[accelerator].vendor
    kinds = [r.distribution for r in catalog.releases().values() if vendor in r.vendors]
    target = Target(
        platform=platform,
        architecture=facts.system.architecture,
        accelerator=accelerator,
        driver=driver if driver and vendor == "nvidia" and is_version(driver) else None,
    )
    return newest_fitting(kinds[0], target)


def _remarks(facts: HostFacts) -> Iterator[str]:
    system, hardware, cards = facts.system, facts.hardware, facts.accelerators
    pack = f" {system.service_pack}" if system.service_pack else ""
    yield f"{system.name}{pack}, kernel {system.kernel}, glibc {system.glibc}"
    yield (
        f"{hardware.model}, {hardware.processors} processors, {hardware.memory / 2**30:.0f} GiB of"
        f" memory, NUMA nodes {', '.join(f'{n}: {c}' for n, c in hardware.numa.items()) or '-'}"
    )
    yield "free disk: " + ", ".join(
        f"{disk.path} {disk.free / 2**30:.0f} GiB" for disk in facts.disks if disk.path != "/usr"
    )
    if cards.devices:
        driver = f"driver {cards.devices[0].driver}"
        cuda = f", CUDA up to {cards.cuda}" if cards.cuda else ""
        yield f"devices 0-{len(cards.devices) - 1}: {cards.devices[0].name}, {driver}{cuda}"
    elif number := _cards(facts).total():
        yield f"{number} devices on the PCI bus, no driver answers"
    yield from _linked(cards.links, cards.device_numa)


def _linked(links: tuple[tuple[str, ...], ...], numa: dict[int, int]) -> Iterator[str]:
    """Which devices may share a model: groups that are linked directly, all to all."""
    groups: list[list[int]] = []
    for index, row in enumerate(links):
        for group in groups:
            if all(is_direct(row[other]) for other in group):
                group.append(index)
                break
        else:
            groups.append([index])
    if links:
        kinds = sorted({link for row in links for link in row if link != "X"})
        yield f"linked devices: {groups} ({', '.join(kinds) or 'a single device'})"
    nodes: dict[int, list[int]] = defaultdict(list)
    for index, node in sorted(numa.items()):
        nodes[node].append(index)
    if nodes:
        yield "devices by NUMA node: " + ", ".join(f"{n}: {held}" for n, held in nodes.items())
