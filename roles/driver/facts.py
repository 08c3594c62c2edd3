"""What a host has of drivers: versions on the disk and in the kernel, and what is unfinished."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pyinfra.api import FactBase

from fp8fleet.plan import CONFIG_DIRECTORY, PEER_UNIT
from roles.operations import WORK_LOCK

UNFINISHED = f"{CONFIG_DIRECTORY}/driver-NAME.unfinished"
"""There while an installer is at work; what it left half-done is installed again."""
INSTALLED = f"{CONFIG_DIRECTORY}/driver-NAME.installed"
"""The version of what leaves no version of its own that is documented."""
REBOOT = "/run/fp8fleet.reboot"
"""There, until the next boot, once something was installed that only a reboot brings in force."""


_WAIT = f"[ -e {WORK_LOCK} ] && flock --timeout 1800 {WORK_LOCK} true"
_NVIDIA = """\
v nvidia "$(modinfo -F version nvidia 2>/dev/null)"
p=/proc/driver/nvidia/version; m='s/.*  \\([0-9][0-9.]*\\)  .*/\\1/p'
v loaded "$(cat /sys/module/nvidia/version 2>/dev/null || sed -n "1$m" $p 2>/dev/null)"
for d in /usr/lib /usr/lib64 /usr/lib/*-linux-gnu; do
  for f in $d/libnvidia-ml.so.*.*; do [ -e $f ] && v library ${f##*libnvidia-ml.so.}; done
done
v fabric-manager "$(nv-fabricmanager --version 2>/dev/null | sed -n 's/.*version is *: *//p')"
systemctl -q is-active nvidia-fabricmanager.service && echo fabric-active"""
_ASCEND = """\
a=/usr/local/Ascend; i=ascend_toolkit_install.info
for n in driver firmware; do
  v ascend-$n "$(sed -n 's/^Version=//p' $a/$n/version.info 2>/dev/null)"
done
v cann-toolkit "$(sed -n 's/^version=//p' $a/cann/*-linux/$i $a/ascend-toolkit/latest/*-linux/$i \
  2>/dev/null | head -n 1)\""""
_MARKS = f"""\
for f in {CONFIG_DIRECTORY}/driver-*; do [ -e $f ] && echo "mark $f $(cat $f)"; done
[ -e {REBOOT} ] && echo reboot"""
_SERVERS = """\
systemctl list-units --plain --no-legend --state=active 'fp8fleet-*.service' 2>/dev/null |
  sed 's/^/unit /'"""


@dataclass(frozen=True)
class DriversState:
    """Versions by the catalogue's names; what is missing has none."""

    versions: dict[str, str] = field(default_factory=dict)
    """On the disk, for the running kernel."""
    loaded: str | None = None
    """Of NVIDIA's module in the kernel."""
    library: str | None = None
    """Of NVIDIA's libraries."""
    fabric_active: bool = False
    unfinished: frozenset[str] = frozenset()
    reboot: bool = False
    """Whether `REBOOT` is there."""
    servers: tuple[str, ...] = ()
    """Units of ours that run servers."""


class Drivers(FactBase[DriversState]):
    """Versions of drivers, from modinfo, the kernel, libraries and Huawei's information files.

    Waits for an installer that a killed run left at work: its outcome is the state.
    """

    def command(self) -> str:
        parts = (_WAIT, _NVIDIA, _ASCEND, _MARKS, _SERVERS)
        return f'v() {{ [ -n "$2" ] && echo "$1 $2"; }}; {"; ".join(parts)}; true'

    @staticmethod
    def default() -> DriversState:
        return DriversState()

    def process(self, output: list[str]) -> DriversState:
        pairs = [line.split(" ", 1) for line in output if " " in line]
        values = {key: value.strip() for key, value in pairs}
        marks = dict(_marks(value for key, value in pairs if key == "mark"))
        versions = {
            key: value
            for key, value in values.items()
            if key not in ("loaded", "library", "mark", "unit")
        }
        for path, version in marks.items():
            if path.endswith(".installed"):
                versions.setdefault(_name(path), version)
        units = [value.split()[0] for key, value in pairs if key == "unit" and value.split()]
        return DriversState(
            versions=versions,
            loaded=values.get("loaded"),
            library=values.get("library"),
            fabric_active="fabric-active" in output,
            unfinished=frozenset(_name(path) for path in marks if path.endswith(".unfinished")),
            reboot="reboot" in output,
            servers=tuple(unit for unit in units if unit != PEER_UNIT),
        )


def _marks(values: Iterable[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        path, _, content = value.partition(" ")
        yield path, content.strip()


def _name(path: str) -> str:
    match = re.search(r"/driver-([a-z-]+)\.\w+$", path)
    return match[1] if match else path
