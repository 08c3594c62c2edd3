"""Packages and kernel parameters, where pyinfra's own operations fall short."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from pyinfra import host, logger
from pyinfra.api import StringCommand, operation

from roles.host.facts import InstalledPackages, KernelParameters
from roles.operations import streamed

APT = (
    "DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300"
    " -o Dpkg::Use-Pty=0"
    " -o Dpkg::Options::=--force-confold"
)


# dpkg does not wait for its lock and says so by exit code 2 (dpkg(1)); 60 tries are 5 minutes.
FINISH_DPKG = (
    "n=0; until dpkg --force-confold --configure -a; do [ $? -eq 2 ] && [ $n -lt 60 ] || exit 1; "
    "n=$((n+1)); sleep 5; done"
)


@operation()
def packages(
    names: Sequence[str], family: str, proxy: str | None, ca_bundle: str | None
) -> Iterator[StringCommand]:
    """Install the distribution's packages that are missing.

    pyinfra's apt.packages does not wait for apt's lock, which a bare host's first boot often holds.

    Args:
        names: package names.
        family: ``apt`` or ``dnf``.
        proxy: HTTP proxy for dnf; apt has it in its own configuration file.
        ca_bundle: the same, of the CA bundle.
    """
    installed = host.get_fact(InstalledPackages, names=names, family=family)
    missing = " ".join(shlex.quote(name) for name in names if name not in installed)
    if not missing:
        return
    if family == "apt":
        # finishes what a killed run left half-configured; nothing otherwise
        yield streamed(f"DEBIAN_FRONTEND=noninteractive sh -c {shlex.quote(FINISH_DPKG)}")
        yield streamed(f"{APT} update")
        yield streamed(f"{APT} --no-install-recommends install {missing}")
    else:
        options = f" --setopt=proxy={shlex.quote(proxy)}" if proxy else ""
        if ca_bundle:
            options += f" --setopt=sslcacert={shlex.quote(ca_bundle)}"
        yield streamed(f"dnf -y{options} install {missing}")


@operation()
def kernel_parameters(values: Mapping[str, str]) -> Iterator[StringCommand]:
    """Bring kernel parameters in force; the file that keeps them is placed before.

    A parameter that this host may not set (in a container) is reported and left.

    Args:
        values: values by parameter name.
    """
    if not values:
        return
    found = host.get_fact(KernelParameters, names=list(values))
    for name, value in values.items():
        have = found.get(name)
        if have is None or have.value is None:
            logger.warning(
                f"{host.print_prefix}kernel parameter {name}: this kernel lacks it; left"
            )
        elif have.value != " ".join(value.split()):
            if have.writable:
                yield StringCommand(f"sysctl -q -w {shlex.quote(f'{name}={value}')}")
            else:
                logger.warning(
                    f"{host.print_prefix}kernel parameter {name} is {have.value}, not {value};"
                    " this host may not set it (a container?): set it on the machine below"
                )
