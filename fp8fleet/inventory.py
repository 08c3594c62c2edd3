"""Reading a pyinfra inventory into typed hosts; errors name group or host, key and value."""

from __future__ import annotations

import difflib
import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from pyinfra.api import Inventory, State
from pyinfra.api.arguments import all_argument_meta
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.ssh import ConnectorData
from pyinfra.context import ctx_inventory, ctx_state
from pyinfra_cli import inventory as pyinfra_inventory
from pyinfra_cli.exceptions import CliError, UnexpectedExternalError, WrappedError
from pyinfra_cli.util import parse_cli_arg

from fp8fleet.errors import OperatorError
from fp8fleet.preflight.codes import CODES
from fp8fleet.secrets import SecretRef
from fp8fleet.spec import GATEWAY_GROUP, HostSpec

SWITCHES: dict[str, tuple[str, ...]] = {
    "verify": ("stamp", "full"),
    "preflight": ("fast", "full"),
    "ignore": ("",),
}
"""`--data` switches of one run, with their values; the first is the default.

`ignore` takes codes of preflight's findings, separated by commas.
"""


_INSTEAD = {
    "instances": ", or, with an accelerator, a workload and device_count",
    "device_count": " or topology for the servers of its workload, or instances",
}
"""What may take the place of a key that a serving host needs."""

_SSH_TYPES: dict[str, type] = get_type_hints(ConnectorData)

SSH_KEYS = tuple(sorted(_SSH_TYPES))
"""pyinfra's own keys of a connection."""

GLOBAL_ARGUMENTS = tuple(sorted(key for key in all_argument_meta if key.startswith("_")))
"""pyinfra's own keys of every operation, such as ``_sudo``."""


@dataclass(frozen=True)
class FleetHost:
    """One host of the inventory: its name, its groups, what it shall be and how SSH reaches it."""

    name: str
    groups: tuple[str, ...]
    spec: HostSpec
    ssh_hostname: str
    ssh_port: int

    @property
    def is_gateway(self) -> bool:
        """Whether the host runs the proxy over the serving hosts, and no engine."""
        return GATEWAY_GROUP in self.groups


@dataclass(frozen=True)
class Fleet:
    """A whole inventory, validated."""

    path: str
    hosts: tuple[FleetHost, ...]
    """In the order in which the file first names them."""
    groups: Mapping[str, tuple[str, ...]] = field(hash=False)
    """The hosts' names by group, each in the group's own order."""


def load_fleet(
    path: str,
    data: Mapping[str, Any] | None = None,
    group_data: Iterable[str] = (),
) -> Fleet:
    """Read the inventory file ``path`` as pyinfra reads it and validate every host.

    Args:
        path: inventory file.
        data: `--data` of the command line; it overrides the inventory.
        group_data: further group data folders, as pyinfra's ``--group-data``.

    Raises:
        OperatorError: the file is missing or broken, or a value cannot mean anything.
    """
    overrides = dict(data or {})
    inventory = read_inventory(path, overrides, list(group_data))
    for host in inventory:
        if not re.fullmatch(r"@?\w[\w./:-]*", str(host.name), re.ASCII) or ".." in host.name:
            raise OperatorError(
                f"{path}: host {host.name!r}: a host's name has letters, digits and . - _ only,"
                " all of them ASCII"
            )
    hosts = tuple(_host(path, inventory, host) for host in inventory)
    if not hosts:
        raise OperatorError(f"{path}: no hosts: define at least one group, a list of host names")
    groups = {name: tuple(h.name for h in group) for name, group in inventory.groups.items()}
    return Fleet(path, hosts, groups)


def parse_data(pairs: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` arguments of the command line into values, as pyinfra does.

    Raises:
        OperatorError: a pair without ``=``.
    """
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise OperatorError(f"--data {pair}: expected key=value")
        parsed[key] = parse_cli_arg(value)
    return parsed


def check_secrets(fleet: Fleet, names: Iterable[str] | None = None) -> None:
    """Resolve every secret that a deploy to the hosts ``names`` (all by default) needs.

    Raises:
        OperatorError: a secret is missing, naming host and key.
    """
    wanted = None if names is None else set(names)
    for host in fleet.hosts:
        if wanted is not None and host.name not in wanted:
            continue
        for key, reference in host.spec.secrets().items():
            where = f"{fleet.path}: host {host.name}: {key}"
            try:
                value = reference.resolve()
            except OperatorError as error:
                raise OperatorError(f"{where}: {error}") from None
            # Keys become a line of an environment file and an HTTP header.
            if key != "sudo_password" and not re.fullmatch(r"[\w.~+/=:-]+", value, re.ASCII):
                raise OperatorError(
                    f"{where}: {reference} holds a character that cannot stand in a key;"
                    " letters, digits and .~+/=:-_ can"
                )


def read_inventory(path: str, overrides: dict[str, Any], group_data: list[str]) -> Inventory:
    """Read an inventory file as pyinfra does; its values are not judged.

    Raises:
        OperatorError: the file is missing or broken.
    """
    if not Path(path).is_file():
        raise OperatorError(f"{path}: no such inventory file")
    try:
        # pyinfra prints the traceback of a broken file; our line names file and error.
        with _pyinfra_contexts(), redirect_stderr(io.StringIO()):
            return pyinfra_inventory.make_inventory_from_files(
                path, overrides, str(Path.cwd()), group_data
            )
    except (WrappedError, CliError, UnexpectedExternalError, PyinfraError) as error:
        cause = getattr(error, "exception", error)
        if isinstance(cause, OperatorError):
            raise cause from None
        where = getattr(error, "filename", path)
        raise OperatorError(f"{where}: {type(cause).__name__}: {cause}") from None
    except (Exception, SystemExit) as error:
        raise OperatorError(f"{path}: {type(error).__name__}: {error}") from None


class _InventoryInOrder(Inventory):  # type: ignore[misc]
    """pyinfra's inventory with the hosts of a group as the file lists them there.

    pyinfra has them in the order in which any group first names them.
    """

    def make_hosts_and_groups(self, names: Any, groups: Any) -> None:
        super().make_hosts_and_groups(names, groups)
        for group, (listed, _) in groups.items():
            order = [host[0] if isinstance(host, tuple) else host for host in listed]
            if group in self.groups:  # hosts that a connector brought come last
                self.groups[group].sort(
                    key=lambda host, order=order: (
                        order.index(host.name) if host.name in order else len(order)
                    )
                )


@contextmanager
def _pyinfra_contexts() -> Iterator[None]:
    """What pyinfra's inventory reader expects around it, inside a pyinfra run and outside."""
    state, inventory = ctx_state.get(), ctx_inventory.get()
    log = logging.getLogger("pyinfra")
    level = log.level
    log.setLevel(logging.ERROR)
    ctx_state.set(state or State())
    pyinfra_inventory.Inventory = _InventoryInOrder
    try:
        yield
    finally:
        pyinfra_inventory.Inventory = Inventory
        ctx_state.set(state)
        ctx_inventory.set(inventory)
        log.setLevel(level)


def _host(path: str, inventory: Inventory, host: Any) -> FleetHost:
    values = {
        key: value
        for key, value in host.data.dict().items()
        if not str(key).startswith(("_", "ssh_")) and key not in SWITCHES
    }
    _check_switches(path, inventory)
    check_connection(path, inventory, host)
    for key in values:
        if key not in HostSpec.model_fields:
            key = str(key)
            raise OperatorError(f"{path}: {_origin(inventory, host, key)}: {_unknown(key)}")
    try:
        spec = HostSpec.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        key = str(detail["loc"][0]) if detail["loc"] else ""
        where = _origin(inventory, host, key) if key in values else f"host {host.name}"
        raise OperatorError(f"{path}: {where}: {_message(detail, values)}") from None
    if host.data.get("ssh_user") == spec.service_user:
        raise OperatorError(
            f"{path}: {_origin(inventory, host, 'ssh_user')}: ssh_user = {spec.service_user!r}: is"
            " service_user too, which fp8fleet makes without a shell: name another service_user"
        )
    fleet_host = FleetHost(
        host.name,
        tuple(host.groups),
        spec,
        str(host.data.get("ssh_hostname") or host.name),
        host.data.get("ssh_port") or 22,
    )
    for user, port in spec.ports:
        if port == fleet_host.ssh_port:
            raise OperatorError(
                f"{path}: host {host.name}: {user}: port {port} is SSH's (ssh_port): choose another"
            )
    missing = spec.required_to_serve()
    if missing and not fleet_host.is_gateway:
        raise OperatorError(
            f"{path}: host {host.name}: {missing[0]} is not set: a serving host needs it"
            f"{_INSTEAD.get(missing[0], '')} (only hosts of the group {GATEWAY_GROUP} do without)"
        )
    return fleet_host


def check_key(key: str) -> None:
    """Check a key of the command line's data that is not pyinfra's own.

    Raises:
        OperatorError: no host has such a key.
    """
    if not key.startswith(("_", "ssh_")) and key not in (*HostSpec.model_fields, *SWITCHES):
        raise OperatorError(f"--data: {_unknown(key)}")


def _check_switches(path: str, inventory: Inventory) -> None:
    for key, allowed in SWITCHES.items():
        value = inventory.get_override_data().get(key, allowed[0])
        if key == "ignore":
            ignored_codes(value)
        elif value not in allowed:
            raise OperatorError(
                f"{path}: --data {key}={value}: expected one of {', '.join(allowed)}"
            )


def ignored_codes(value: object) -> frozenset[str]:
    """The codes that ``--data ignore=CODE,...`` names.

    Raises:
        OperatorError: a code that no finding has.
    """
    codes = [code.strip() for code in str(value or "").split(",") if code.strip()]
    for code in codes:
        if code not in CODES:
            near = difflib.get_close_matches(code, CODES, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/preflight.md lists them"
            raise OperatorError(f"--data ignore={value}: {code}: no such code; {hint}")
    return frozenset(codes)


_WORDS = {str: "a text", int: "a number", float: "a number", bool: "True or False", dict: "a table"}


def check_connection(path: str, inventory: Inventory, host: Any) -> None:
    """Check the keys of a host's connection, which pyinfra does with a traceback, if at all.

    Args:
        path: the inventory's, for messages.

    Raises:
        OperatorError: an unknown key, or a value that none can be.
    """
    for key, value in host.data.dict().items():
        for prefix, known in (("ssh_", SSH_KEYS), ("_", GLOBAL_ARGUMENTS)):
            if str(key).startswith(prefix) and key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"pyinfra has {', '.join(known)}"
                raise OperatorError(
                    f"{path}: {_origin(inventory, host, key)}: {key}: unknown key; {hint}"
                )
        if key == "ssh_port" and (type(value) is not int or not 1 <= value <= 65535):
            where = _origin(inventory, host, key)
            raise OperatorError(
                f"{path}: {where}: ssh_port: {value!r} is not a port number (1-65535)"
            )
        if key in _SSH_TYPES and not _has_type(value, _SSH_TYPES[key]):
            # the value may be a password
            where = _origin(inventory, host, key)
            raise OperatorError(f"{path}: {where}: {key}: expected {_WORDS[_SSH_TYPES[key]]}")


def _has_type(value: object, kind: type) -> bool:
    """As pyinfra judges it, but that True is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def sudo_password(path: str, inventory: Inventory, host: Any) -> SecretRef | None:
    """The reference to a host's sudo password, in an inventory that need not be complete.

    Raises:
        OperatorError: it is no reference to a secret.
    """
    try:
        return TypeAdapter(SecretRef | None).validate_python(host.data.get("sudo_password"))
    except ValidationError as error:
        where = _origin(inventory, host, "sudo_password")
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise OperatorError(f"{path}: {where}: sudo_password: {said}") from None


def _origin(inventory: Inventory, host: Any, key: str) -> str:
    """Where the value of ``key`` that holds for ``host`` was written."""
    if key in inventory.get_override_data():
        return "--data"
    if key in inventory.get_host_data(host.name):
        return f"host {host.name}"
    for group in reversed(host.groups):
        if key in inventory.get_group_data(group):
            return f"group {group}"
    return "group all"


def _unknown(key: str) -> str:
    known = [*HostSpec.model_fields, *SWITCHES]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/inventory.md lists the keys"
    return f"{key}: unknown key; {hint}"


def _written(detail: ErrorDetails, values: Any) -> Iterator[str]:
    """The keys of a pydantic error's location that the inventory has or lacks.

    pydantic's own words for what it tried, such as ``int`` or ``[key]``, stand behind them.
    """
    for part in detail["loc"]:
        listed = isinstance(values, list | tuple) and part in range(len(values))
        if listed or (isinstance(values, Mapping) and part in values):
            values = values[part]
            yield str(part)
        elif detail["type"] == "missing":
            yield str(part)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 100 else text[:97] + "..."


def _message(detail: ErrorDetails, values: Mapping[str, Any]) -> str:
    """One line of a pydantic error: key, value, what would be right."""
    location = ".".join(_written(detail, values))
    text = detail["msg"].removeprefix("Value error, ")
    if not location:
        return text
    value = detail["input"]
    # Whole tables may hold a key or a token that was pasted in; only plain values are repeated.
    if re.search(r"key|token|secret|password", location, re.IGNORECASE) or not isinstance(
        value, str | int | float
    ):
        return f"{location}: {text}"
    shown = _shown(value)
    line = f"{location}: {text}" if shown in text else f"{location} = {shown}: {text}"
    return re.sub(r"//[^/@]*@", "//...@", line)  # a login in a URL
