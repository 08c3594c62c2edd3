"""An RPM of the lab: what a Debian package becomes, and the spec file that builds all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DIST = ".ky10"
WORK = "/mnt"
"""Where the build's folder lies as rpmbuild sees it: ``payload/NAME`` and ``lists/NAME`` in it."""

_HEAD = f"""\
Name: fp8lab
Version: 1
Release: 1
Summary: holds the packages of the lab
License: as in Debian
AutoReqProv: no
%description
Never built itself.
%install
mkdir -p %{{buildroot}}
for one in {WORK}/payload/*; do cp -al "$one/." %{{buildroot}}/; done
"""

# What Debian's own maintainer scripts would do, as RPM distributions have it in triggers.
_AFTER = """\
ldconfig
systemd-sysusers >/dev/null 2>&1 || :
[ ! -d /run/systemd/system ] || systemctl daemon-reload"""


@dataclass(frozen=True)
class Rpm:
    """One package; ``requires`` and ``provides`` are names without versions."""

    name: str
    version: str
    release: str = "1"
    noarch: bool = False
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    before: str = ""
    """Shell script that runs before the files are unpacked."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """``%attr`` arguments (mode, owner, group) of paths that are not root's."""


def from_control(control: str, names: Mapping[str, str]) -> Rpm:
    """The RPM of a Debian package.

    Args:
        control: the package's control file (deb-control(5)).
        names: the RPM's name by the Debian package's, of every package that becomes one; other
            dependencies are the image's own.
    """
    fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", control, re.MULTILINE))
    version, _, release = fields["Version"].split(":", 1)[-1].partition("-")
    depends = ", ".join(fields.get(name, "") for name in ("Pre-Depends", "Depends"))
    return Rpm(
        name=names[fields["Package"]],
        version=version,
        release=(release or "1").replace("-", "."),
        noarch=fields["Architecture"] == "all",
        requires=tuple(dict.fromkeys(_required(depends, names))),
    )


def _required(depends: str, names: Mapping[str, str]) -> Iterable[str]:
    for group in depends.split(","):
        alternatives = [
            re.split(r"[\s:(]", word.strip(), maxsplit=1)[0] for word in group.split("|")
        ]
        yield from [names[name] for name in alternatives if name in names][:1]


def spec(packages: Sequence[Rpm]) -> str:
    """The spec file that makes every package in one run of rpmbuild."""
    return _HEAD + "".join(map(_section, packages))


def _section(package: Rpm) -> str:
    name = package.name
    lines = [
        f"%package -n {name}",
        f"Version: {package.version}",
        f"Release: {package.release}{DIST}",
        f"Summary: {name} of the lab, made of Debian's",
        "AutoReqProv: no",
        *(["BuildArch: noarch"] if package.noarch else []),
        *(f"Requires: {other}" for other in package.requires),
        *(f"Provides: {other}" for other in package.provides),
        f"%description -n {name}",
        "Made of Debian's binaries, for the lab of fp8fleet only.",
    ]
    if package.before:
        lines += [f"%pre -n {name}", package.before]
    lines += [f"%post -n {name}", _AFTER, f"%files -n {name} -f {WORK}/lists/{name}"]
    return "\n".join(lines) + "\n\n"


def listed(payload: Path, modes: Mapping[str, str]) -> str:
    """The list of files of a package: its files, links and empty folders.

    Folders with something in them belong to nobody, since a package that owns ``/usr/lib`` takes
    it along when it is removed.

    Args:
        payload: the folder whose content is the package's.
        modes: ``%attr`` arguments by path.
    """
    lines = []
    for path in sorted(payload.rglob("*")):
        folder = path.is_dir() and not path.is_symlink()
        place = f"/{path.relative_to(payload)}"
        if folder and place not in modes and any(path.iterdir()):
            continue
        words = ["%dir"] if folder else ["%config(noreplace)"] if place.startswith("/etc/") else []
        words += [f"%attr({modes[place]})"] if place in modes else []
        lines.append(" ".join([*words, f'"{place}"']))
    return "".join(f"{line}\n" for line in lines)
