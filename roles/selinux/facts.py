"""What SELinux is on a host, and what it denied."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pyinfra.api import FactBase

CONFIG = "/etc/selinux/config"


@dataclass(frozen=True)
class SelinuxState:
    """SELinux on a host.

    The policy's local changes are read from the files in which libsemanage keeps them: semanage
    itself takes a second or, on a slow host, ten.
    """

    mode: str | None
    """``enforcing`` or ``permissive``; None: disabled at boot, or the kernel lacks it."""
    configured: str | None
    """The mode after a reboot."""
    booleans: dict[str, bool]
    """Values in force."""
    persistent: dict[str, bool]
    """Values that someone set for good."""
    ports: tuple[tuple[range, str], ...]
    """TCP ports that someone labelled, and their types."""
    equivalences: dict[str, str]
    mislabelled: tuple[str, ...]
    """Those of the paths asked for that have another label than the policy says."""


class Selinux(FactBase[SelinuxState]):
    """SELinux's mode, booleans, port labels and equivalences, and paths with a wrong label."""

    def command(self, booleans: Sequence[str], paths: Sequence[str]) -> str:
        files = " ".join(shlex.quote(path) for path in paths)
        return (
            f"[ -r /sys/fs/selinux/enforce ] || exit 0; "
            'echo "enforce $(cat /sys/fs/selinux/enforce)"; '
            f"sed -n 's/^SELINUX=/config /p' {CONFIG}; "
            f"for b in {' '.join(booleans)}; do "
            'echo "boolean $b $(cat /sys/fs/selinux/booleans/$b 2>/dev/null)"; done; '
            f"t=$(sed -n 's/^SELINUXTYPE=//p' {CONFIG}); "
            # libsemanage's store: where it is now, and where it was (semanage.conf(5), store-root)
            "for s in /var/lib/selinux/$t/active /etc/selinux/$t/active"
            " /etc/selinux/$t/modules/active; do [ ! -d $s ] || break; done; "
            "sed -n 's/^[a-z].*=[01]$/persistent &/p' $s/booleans.local 2>/dev/null; "
            "grep -s '^portcon tcp ' $s/ports.local; "
            "sed -n 's/^\\/.*/like &/p' /etc/selinux/$t/contexts/files/file_contexts.subs"
            " 2>/dev/null; "
            f"for p in {files}; do [ ! -e $p ] || restorecon -n -v $p; done; true"
        )

    @staticmethod
    def default() -> SelinuxState:
        return SelinuxState(None, None, {}, {}, (), {}, ())

    def process(self, output: list[str]) -> SelinuxState:
        found: dict[str, list[list[str]]] = {}
        for kind, *words in (line.split() for line in output if line.strip()):
            # a word short: nothing that the host's files mean
            if len(words) >= _WORDS.get(kind, 1):
                found.setdefault(kind, []).append(words)
        enforce = found.get("enforce", [[""]])[0]
        pairs = [row[0].partition("=") for row in found.get("persistent", [])]
        return SelinuxState(
            mode={"1": "enforcing", "0": "permissive"}.get(enforce[0]),
            configured=next((row[0].lower() for row in found.get("config", [])), None),
            booleans={row[0]: row[1] == "1" for row in found.get("boolean", [])},
            persistent={name: value == "1" for name, _, value in pairs},
            ports=tuple(port for row in found.get("portcon", []) if (port := _port(row))),
            equivalences={row[0]: row[1] for row in found.get("like", [])},
            mislabelled=tuple(row[1] for row in found.get("Would", []) if row[0] == "relabel"),
        )


_WORDS = {"boolean": 2, "like": 2, "portcon": 3, "Would": 2}
"""How many words a line has behind its first, where it is more than one."""


def _port(row: list[str]) -> tuple[range, str] | None:
    """``tcp 8000-8010 system_u:object_r:http_port_t:s0``, as libsemanage's ports.local has it."""
    ports = re.fullmatch(r"(?P<first>[0-9]{1,5})(-(?P<last>[0-9]{1,5}))?", row[1])
    label = row[2].split(":")
    if ports is None or len(label) < 3:
        return None
    return range(int(ports["first"]), int(ports["last"] or ports["first"]) + 1), label[2]


@dataclass(frozen=True)
class Denial:
    """One ``avc:  denied`` of the audit log."""

    line: str
    source: str
    """Type of who was denied."""
    target: str
    kind: str
    """Class of the object, such as ``tcp_socket``."""
    permissions: tuple[str, ...]
    program: str
    enforced: bool
    """False: the mode let it pass."""
    event: str
    """All records of the event, which name programs and files."""
    unit: str
    """The unit of ours that the process belongs to; empty: none, or it has ended."""

    @property
    def rule(self) -> str:
        """The rule that would allow it."""
        access = " ".join(self.permissions)
        return f"allow {self.source} {self.target}:{self.kind} {{ {access} }};"


class Denials(FactBase[list[Denial]]):
    """What SELinux denied in the last ``seconds``, from auditd's log and the kernel's."""

    def command(self, seconds: float) -> str:
        # An event is several lines with one serial; those of a denied one are printed.
        denied = (
            "match($0, /audit[(][0-9.]+:[0-9]+[)]/) {"
            " e = substr($0, RSTART + 6, RLENGTH - 7); if (e + 0 < now - ago) next;"
            " if (/avc: +denied/) denied[e] = 1; event[e] = event[e] $0 RS }"
            ' END { for (e in denied) printf "%s", event[e] }'
        )
        return (
            "[ -r /sys/fs/selinux/enforce ] || exit 0; n=$(date +%s.%N); "
            "l=$(sed -n 's/^log_file *= *//p' /etc/audit/auditd.conf 2>/dev/null); "
            '{ [ -z "$l" ] || cat $l.1 $l; '
            f"journalctl -q -k -o cat --since @$((${{n%.*}} - {int(seconds) + 1})); }} 2>/dev/null"
            f" | awk -v now=$n -v ago={seconds:.3f} '{denied}' | while IFS= read -r line; do "
            "p=${line#* pid=}; p=${p%% *}; "
            "u=$(grep -o 'fp8fleet-[^/]*[.]service' /proc/$p/cgroup 2>/dev/null | head -n 1); "
            'echo "unit=$u $line"; done'
        )

    @staticmethod
    def default() -> list[Denial]:
        return []

    def process(self, output: list[str]) -> list[Denial]:
        events: dict[str, list[str]] = {}
        for line in output:
            if match := re.search(r"audit\([\d.]+:\d+\)", line):
                events.setdefault(match[0], []).append(line)
        found: dict[str, Denial] = {}
        for lines in events.values():
            for line in lines:
                if denial := _denial(line, "\n".join(lines)):
                    found.setdefault(denial.line, denial)
        return list(found.values())


def _denial(text: str, event: str) -> Denial | None:
    """A line such as ``... avc:  denied  { name_bind } for  pid=5 comm="nginx" src=8081
    scontext=u:r:httpd_t:s0 tcontext=u:object_r:soundd_port_t:s0 tclass=tcp_socket permissive=0``
    (the kernel's security/selinux/avc.c); None where it is another record.
    """
    unit, _, line = text.removeprefix("unit=").partition(" ")
    match = re.search(
        r"avc: +denied +\{ (?P<permissions>[^}]*) \}.*scontext=[^:]*:[^:]*:(?P<source>[^: ]+)"
        r".* tcontext=[^:]*:[^:]*:(?P<target>[^: ]+).* tclass=(?P<kind>\w+)",
        line,
    )
    if match is None:
        return None
    program = re.search(r'comm="?([^" ]+)', line)
    return Denial(
        line=line[line.index("avc:") :],
        source=match["source"],
        target=match["target"],
        kind=match["kind"],
        permissions=tuple(match["permissions"].split()),
        program=program[1] if program else "?",
        enforced="permissive=1" not in line,
        event=event,
        unit=unit,
    )


class AllowRules(FactBase[list[str]]):
    """What audit2allow says of denials; nothing where the host lacks it."""

    def command(self, lines: Sequence[str]) -> str:
        records = " ".join(shlex.quote(f"type=AVC msg=audit(0.0:0): {line}") for line in lines)
        return f"! command -v audit2allow >/dev/null || printf '%s\\n' {records} | audit2allow"

    @staticmethod
    def default() -> list[str]:
        return []

    def process(self, output: list[str]) -> list[str]:
        return [line.strip() for line in output if line.strip().strip("#= ")]
