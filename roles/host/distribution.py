"""Distribution packages: sources, exact versions, holds; where pyinfra's own operations fall short.

apt.packages does not wait for apt's lock, which a bare host's first boot often holds; dnf.packages
asks once a package and does not converge on a version.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation

from fp8fleet.plan import STATE_DIRECTORY, HostPlan
from roles.host.facts import (
    DNF_CONFIGURATION,
    AvailableVersions,
    Holds,
    dnf_markers,
)
from roles.host.state import forget, host_facts
from roles.operations import failed, streamed

_EXCLUDE_KEYS = ("excludepkgs", "exclude")

Commands = Iterator[StringCommand | FunctionCommand]

APT = (
    "DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300"
    " -o Dpkg::Use-Pty=0"
    " -o Dpkg::Options::=--force-confold"
)

# dpkg does not wait for its lock and says so by exit code 2, as it says that it cannot read its
# database (dpkg(1)); dpkg-query needs no lock, so it tells the two apart. 60 tries are 5 minutes.
FINISH_DPKG = (
    "n=0; until dpkg --force-confold --configure -a; do"
    " [ $? -eq 2 ] && dpkg-query -W dpkg >/dev/null && [ $n -lt 60 ] || exit 1; "
    "n=$((n+1)); sleep 5; done"
)

# rpm waits for its lock for ever, dnf for its own too, or exits with 200 (dnf.conf(5)).
_RPM_IS_FREE = (
    "i=$(stat -c %i $(rpm --eval %_dbpath)/.rpm.lock 2>/dev/null); "
    '! grep -s -q -E " WRITE +[0-9]+ [0-9a-f:]+:$i " /proc/locks'
)
_DNF_GIVES_UP = (
    "{ echo 'another program has held the lock of dnf or rpm for 5 minutes:"
    " end it (ps -C dnf,yum,rpm,packagekitd) and run again' >&2; exit 1; }"
)


def has_version(family: str, have: Sequence[str], want: str) -> bool:
    """Whether one of the versions ``have`` is what ``want`` says.

    Args:
        family: ``apt`` or ``dnf``.
        have: versions; of RPMs ``EPOCH:VERSION-RELEASE``.
        want: a version; of an RPM the epoch and the release may be left out.
    """
    if family == "apt":
        return want in have
    shown = (v if ":" in want else v.partition(":")[2] for v in have)
    return any(v == want if "-" in want else v.rpartition("-")[0] == want for v in shown)


@operation()
def package_sources(plan: HostPlan) -> Iterator[StringCommand]:
    """Have dnf use the site's package sources alone, or no longer.

    dnf has no folder for parts of its main configuration: our lines stand between two comments.
    The host's own .repo files stay as they are. apt reads a file of ours instead.
    """
    if plan.family != "dnf":
        return
    want = plan.preparation.dnf_sources
    if host_facts(plan).dnf_sources != want:
        forget()
        yield StringCommand(_dnf_block("sources", want))


@operation()
def packages(plan: HostPlan) -> Commands:
    """Install what is missing, and pinned packages at exactly their versions."""
    pins = plan.preparation.versions
    found = host_facts(plan).packages
    missing = [name for name in plan.packages if name not in found and name not in pins]
    wrong = _wrong(plan, found)
    if not missing and not wrong:
        return
    forget()
    yield from refreshed(plan)
    if wrong and host.state.is_executing and (unknown := _unavailable(plan, wrong)):
        yield failed(unknown)
        return
    if wrong:
        yield streamed(_install_pinned(plan, wrong))
    if missing:
        yield streamed(install_command(plan, missing))
    if wrong and host.state.is_executing:
        for name in _wrong(plan, found := host_facts(plan).packages):
            have = ", ".join(found.get(name, ())) or "none"
            yield failed(
                f"package {name}: version {pins[name]} is asked for, {have} is installed after"
                " the installation; another package of package_versions may need another one"
            )


def _wrong(plan: HostPlan, found: dict[str, tuple[str, ...]]) -> list[str]:
    """Names of the pinned packages that don't have their version."""
    pins = plan.preparation.versions
    return [n for n in pins if not has_version(plan.family, found.get(n, ()), pins[n])]


def _unavailable(plan: HostPlan, names: Sequence[str]) -> str | None:
    """One line on the first package whose version the sources lack."""
    offered = host.get_fact(
        AvailableVersions, names=names, family=plan.family, options=dnf_options(plan)
    )
    for name in names:
        want = plan.preparation.versions[name]
        have = offered.get(name, ())
        if not has_version(plan.family, have, want):
            listed = ", ".join(have) or "no version at all"
            return (
                f"package {name}: version {want} (package_versions) is not in the package"
                f" sources; they have {listed}"
            )
    return None


def refreshed(plan: HostPlan) -> Iterator[StringCommand]:
    """Make apt ready to install; dnf does its part itself."""
    if plan.family == "apt":
        # finishes what a killed run left half-configured; nothing otherwise
        yield streamed(f"DEBIAN_FRONTEND=noninteractive sh -c {shlex.quote(FINISH_DPKG)}")
        yield streamed(f"{APT} update")


def install_command(plan: HostPlan, names: Sequence[str]) -> str:
    """A command that installs packages, in whatever version the sources have."""
    quoted = " ".join(shlex.quote(name) for name in names)
    if plan.family == "apt":
        return f"{APT} --no-install-recommends install {quoted}"
    return dnf_command(f"{dnf_options(plan)} --refresh install {quoted}")


def _install_pinned(plan: HostPlan, names: Sequence[str]) -> str:
    """Older or newer, held or not; what was held is held again."""
    pins = plan.preparation.versions
    quoted = " ".join(shlex.quote(name) for name in names)
    if plan.family == "apt":
        exact = " ".join(shlex.quote(f"{name}={pins[name]}") for name in names)
        options = "--no-install-recommends --allow-downgrades --allow-change-held-packages"
        script = (
            f"held=$(apt-mark showhold {quoted}); {APT} {options} install {exact}; r=$?;"
            ' [ -z "$held" ] || apt-mark hold $held; exit $r'
        )
        return f"sh -c {shlex.quote(script)}"
    # dnf goes back to an older version where that is what the name says
    exact = " ".join(shlex.quote(f"{name}-{pins[name]}") for name in names)
    return dnf_command(f"{dnf_options(plan)} --refresh --disableexcludes=main install {exact}")


def dnf_options(plan: HostPlan) -> str:
    """apt has these in its own configuration file."""
    options = f" --setopt=proxy={shlex.quote(plan.proxy_url)}" if plan.proxy_url else ""
    if plan.ca_bundle:
        options += f" --setopt=sslcacert={shlex.quote(plan.ca_bundle)}"
    return options


def dnf_command(arguments: str) -> str:
    """dnf, which waits five minutes for its own lock and rpm's."""
    command = f"dnf -y --setopt=exit_on_lock=True{arguments}"
    script = (
        f"n=0; until {_RPM_IS_FREE} && {{ {command}; r=$?; [ $r -ne 200 ]; }}; do "
        f"[ $n -lt 60 ] || {_DNF_GIVES_UP}; n=$((n+1)); sleep 5; done; exit $r"
    )
    return f"sh -c {shlex.quote(script)}"


def _dnf_block(name: str, lines: Sequence[str]) -> str:
    """Replace our lines ``name`` in the main section of dnf's configuration."""
    begin, end = dnf_markers(name)
    block = "\\n".join([begin, *lines, end]) if lines else ""
    program = (
        "$0 == b { inside = 1 } !inside { print } $0 == e { inside = 0 }"
        ' !done && text != "" && /^\\[main\\]/ { print text; done = 1 }'
    )
    variables = f"-v b={shlex.quote(begin)} -v e={shlex.quote(end)} -v text={shlex.quote(block)}"
    file, new = DNF_CONFIGURATION, f"{DNF_CONFIGURATION}.fp8fleet-new"
    return (
        f"umask 022; mkdir -p /etc/dnf; grep -s -q '^.main.' {file} || echo '[main]' >>{file};"
        f" awk {variables} {shlex.quote(program)} {file} >{new} && sync {new}"
        f" && mv -fT {new} {file}"
        f" || {{ rm -f {new}; exit 1; }}"
    )


@operation()
def held_packages(plan: HostPlan) -> Commands:
    """Have upgrades leave the planned packages; release what only fp8fleet held.

    apt: ``apt-mark hold`` of what is installed, noted in a file of ours. dnf: our ``excludepkgs``,
    which needs no plugin and comes beside the operator's own ``exclude``.
    """
    patterns = plan.preparation.held
    found = host.get_fact(Holds, patterns=patterns, family=plan.family)
    if plan.family == "dnf":
        # of two lines with one key only the last counts, but both keys do (dnf.conf(5))
        keys = [key for key in _EXCLUDE_KEYS if key not in found.exclude_keys]
        if patterns and not keys:
            yield failed(
                f"{DNF_CONFIGURATION} has exclude and excludepkgs: join them in one line, so that"
                " hold_packages has the other"
            )
            return
        want = (f"{keys[0]}={' '.join(patterns)}",) if patterns else ()
        if found.excluded != want:
            yield StringCommand(_dnf_block("holds", want))
        return
    hold = found.matching - found.held
    release = (found.ours - found.matching) & found.held
    ours = (found.ours & found.matching) | hold
    if hold or release or ours != found.ours:
        # noted before it is done: what a killed run has held is still known to be ours
        steps = [_note_held(found.ours | hold)] if hold else []
        steps += [f"apt-mark hold {' '.join(sorted(hold))}"] if hold else []
        steps += [f"apt-mark unhold {' '.join(sorted(release))}"] if release else []
        yield StringCommand(" && ".join([*steps, _note_held(ours)]))


def _note_held(names: frozenset[str]) -> str:
    file = f"{STATE_DIRECTORY}/held"
    text = " ".join(sorted(names))
    content = f"printf '%s\\n' {text}" if names else "true"
    return f"{content} >{file}.new && mv -fT {file}.new {file}"
