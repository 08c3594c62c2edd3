"""Where RPM distributions differ from Debian in more than the names of packages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lab.rpm.package import Rpm

PACKAGES = (
    *("ca-certificates", "curl", "nginx", "g++", "gcc", "make", "ninja-build"),
    *("numactl", "libnuma1", "chrony", "logrotate", "firewalld"),
    *("selinux-utils", "policycoreutils", "policycoreutils-python-utils"),
)
"""The Debian packages that RPM hosts can install, with all that these need."""

NAMES = {
    "g++": "gcc-c++",
    "libnuma1": "numactl-libs",
    "selinux-utils": "libselinux-utils",
}
"""Names that the catalogue has otherwise; every other package keeps Debian's."""

MERGED = {"nginx-common", "openssl"}
"""Debian packages that become none: what is needed of them stands in another."""

RELEASE = "kylin-release"

_OS_RELEASE = """\
NAME="Kylin Linux Advanced Server"
VERSION="V10 (Lance)"
ID="kylin"
VERSION_ID="V10"
PRETTY_NAME="Kylin Linux Advanced Server V10 (Lance)"
ANSI_COLOR="0;31"
"""
_RELEASE_LINE = "Kylin Linux Advanced Server release V10 (Lance)\n"
_PRODUCT = "Kylin Linux Advanced Server\nrelease V10 (SP3) /(Lance)-x86_64-Build23/20230324\n"

_NGINX_CONF = """\
user nginx;
worker_processes auto;
error_log /var/log/nginx/error.log;
pid /run/nginx.pid;
events {
    worker_connections 1024;
}
http {
    access_log /var/log/nginx/access.log;
    include /etc/nginx/mime.types;
    include /etc/nginx/conf.d/*.conf;
    server {
        listen 80;
        root /usr/share/nginx/html;
        include /etc/nginx/default.d/*.conf;
    }
}
"""
_NGINX_UNIT = """\
[Unit]
Description=The nginx HTTP and reverse proxy server
After=network-online.target remote-fs.target nss-lookup.target
Wants=network-online.target

[Service]
Type=forking
PIDFile=/run/nginx.pid
ExecStartPre=/usr/sbin/nginx -t
ExecStart=/usr/sbin/nginx
ExecReload=/usr/sbin/nginx -s reload
KillSignal=SIGQUIT
TimeoutStopSec=5
KillMode=mixed
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""
_CHRONY_CONF = """\
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
logdir /var/log/chrony
"""
_CHRONY_UNIT = """\
[Unit]
Description=NTP client/server
After=network.target
Conflicts=systemd-timesyncd.service
ConditionCapability=CAP_SYS_TIME

[Service]
Type=forking
PIDFile=/run/chrony/chronyd.pid
EnvironmentFile=-/etc/sysconfig/chronyd
ExecStart=/usr/sbin/chronyd -f /etc/chrony.conf -u chrony $OPTIONS
RuntimeDirectory=chrony

[Install]
WantedBy=multi-user.target
"""

# What a server installation of Kylin V10 SP3 has before anything is added. Packages without files:
# the image's own programs are Debian's, so that versions here say nothing of them.
BASE = (
    Rpm("glibc", "2.28", "84.p08"),
    Rpm("bash", "5.0", "15", provides=("/bin/sh", "/bin/bash", "/usr/bin/bash", "/usr/bin/sh")),
    Rpm("systemd", "243", "57.p05"),
    Rpm("openssh-server", "8.2p1", "9"),
    Rpm("python3", "3.7.9", "18"),
    Rpm("sudo", "1.9.2", "5"),
    Rpm("tar", "1.32", "3"),
    Rpm("coreutils", "8.32", "3"),
    Rpm("shadow-utils", "4.8.1", "3", provides=("shadow",)),
    Rpm("util-linux", "2.35.2", "7"),
    Rpm("rpm", "4.15.1", "24"),
    Rpm("dnf", "4.2.23", "4", noarch=True, provides=("yum",)),
    Rpm("kernel", "4.19.90", "52.22.v2207"),
    Rpm(
        RELEASE, "10", "24.6.p41", noarch=True,
        provides=("system-release = 10", "system-release(releasever) = 10"),
    ),
)  # fmt: skip


def adapt(package: Rpm, payload: Path, unpacked: Path) -> Rpm:
    """Give a package the layout that RPM distributions have.

    Args:
        package: the package as Debian's metadata describe it.
        payload: its files, which are changed.
        unpacked: folders with the files of the packages in MERGED, by name.
    """
    for path, target in _LINKS.get(package.name, {}).items():
        _link(payload / path, target)
    change = _CHANGES.get(package.name)
    return change(package, payload, unpacked) if change else package


def base_files(name: str, payload: Path) -> None:
    """Fill the payload of a package of BASE; only the release has files."""
    payload.mkdir(parents=True, exist_ok=True)
    if name != RELEASE:
        return
    _write(payload / "usr/lib/os-release", _OS_RELEASE)
    _link(payload / "etc/os-release", "../usr/lib/os-release")
    _write(payload / "etc/kylin-release", _RELEASE_LINE)
    _link(payload / "etc/system-release", "kylin-release")
    _write(payload / "etc/.productinfo", _PRODUCT)


def _nginx(package: Rpm, payload: Path, unpacked: Path) -> Rpm:
    common = unpacked / "nginx-common/etc/nginx"
    for name in ("mime.types", "fastcgi_params", "uwsgi_params", "scgi_params"):
        (payload / "etc/nginx").mkdir(parents=True, exist_ok=True)
        shutil.copy2(common / name, payload / "etc/nginx" / name)
    _write(payload / "etc/nginx/nginx.conf", _NGINX_CONF)
    _write(payload / "usr/share/nginx/html/index.html", "<h1>nginx</h1>\n")
    _write(payload / "usr/lib/systemd/system/nginx.service", _NGINX_UNIT)
    owned = ("var/lib/nginx", "var/log/nginx")
    for folder in ("etc/nginx/conf.d", "etc/nginx/default.d", *owned):
        (payload / folder).mkdir(parents=True, exist_ok=True)
    modes = {f"/{folder}": "755, nginx, root" for folder in owned}
    return replace(
        package, before=_account("nginx", "/var/lib/nginx"), modes=modes, provides=("webserver",)
    )


def _chrony(package: Rpm, payload: Path, unpacked: Path) -> Rpm:
    del unpacked
    for kept in ("usr/bin/chronyc", "usr/sbin/chronyd"):
        (payload / kept).rename(payload / Path(kept).name)
    for part in ("etc", "usr", "var"):
        shutil.rmtree(payload / part)
    for kept in ("usr/bin/chronyc", "usr/sbin/chronyd"):
        (payload / kept).parent.mkdir(parents=True, exist_ok=True)
        (payload / Path(kept).name).rename(payload / kept)
    _write(payload / "etc/chrony.conf", _CHRONY_CONF)
    _write(payload / "usr/lib/systemd/system/chronyd.service", _CHRONY_UNIT)
    owned = ("var/lib/chrony", "var/log/chrony")
    for folder in owned:
        (payload / folder).mkdir(parents=True)
    modes = {f"/{folder}": "755, chrony, chrony" for folder in owned}
    return replace(package, before=_account("chrony", "/var/lib/chrony"), modes=modes)


def _certificates(package: Rpm, payload: Path, unpacked: Path) -> Rpm:
    """The bundle ready made: Debian makes it when the package is installed."""
    del unpacked
    each = sorted((payload / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = "".join(file.read_text() for file in each)
    for part in ("etc", "usr"):
        shutil.rmtree(payload / part, ignore_errors=True)
    _write(payload / "etc/pki/tls/certs/ca-bundle.crt", bundle)
    # where the programs made of Debian's look
    _link(payload / "etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
    return replace(package, requires=())


def _account(name: str, home: str) -> str:
    return (
        f"getent group {name} >/dev/null || groupadd -r {name}\n"
        f"getent passwd {name} >/dev/null ||"
        f" useradd -r -g {name} -d {home} -s /sbin/nologin {name}"
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


_POLKIT = "usr/share/polkit-1/actions/org.fedoraproject.FirewallD1"
_LINKS = {
    "gcc": {"usr/bin/cc": "gcc"},
    "gcc-c++": {"usr/bin/c++": "g++"},
    "ninja-build": {"usr/bin/ninja-build": "ninja"},
    # polkit, which is asked for root too, has to know its actions: both families link them late
    "firewalld": {f"{_POLKIT}.policy": "org.fedoraproject.FirewallD1.server.policy.choice"},
}
"""Links that a package has there, and what they name."""

_CHANGES: dict[str, Callable[[Rpm, Path, Path], Rpm]] = {
    "nginx": _nginx,
    "chrony": _chrony,
    "ca-certificates": _certificates,
}
