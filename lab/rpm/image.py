"""Builds the image of RPM hosts and the repository that they install from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from lab import apt
from lab.image import build_base
from lab.processes import run, say, stream
from lab.rpm import fedora, package
from lab.site import build_once

TOOLS = ("dnf", "rpm", "createrepo-c", "netbase")
# Raise it when the steps below change: images of another recipe are then not used any more.
_RECIPE = 1

# $1: root folder, $2: folder that is /mnt in it; the rest runs there. In its own namespaces an
# interrupted build leaves no mount and no process.
_ENTER = (
    'mount --bind "$2" "$1/mnt" && mount -t proc proc "$1/proc" || exit 1;'
    ' root=$1; shift 2; exec chroot "$root" "$@"'
)
_UNWANTED = ("doc", "man", "info", "lintian", "bug", "locale")
_MERGED_FOLDERS = ("bin", "sbin", "lib", "lib64")

_DNF_CONF = """\
[main]
gpgcheck=1
installonly_limit=3
clean_requirements_on_remove=True
best=True
skip_if_unavailable=False
"""


def build_rpm(cache: Path) -> Path:
    """Return a folder with ``root``, the image, and ``repository``, built the first time.

    Args:
        cache: the lab's cache folder.
    """
    base = build_base(cache)
    sources = sorted(Path(__file__).parent.glob("*.py"))
    key = json.dumps([base.name, *(file.read_text() for file in sources), _RECIPE])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return build_once(cache / f"rpm-{digest}", lambda folder: _build(folder, cache, base))


def _build(folder: Path, cache: Path, base: Path) -> None:
    say("RPM hosts: an image like Kylin V10 SP3 and its packages, out of Debian 12's, once")
    debs = apt.build_repository(cache, base, [*TOOLS, *fedora.PACKAGES])
    root, work = folder / "root", folder / "work"
    run(["cp", "-a", str(base), str(root)])
    (work / "repository").mkdir(parents=True)
    run(["cp", "-a", str(debs), str(work / "debs")])
    _install_tools(root, work)
    _write_packages(root, work)
    _make_repository(root, work)
    _become_kylin(root, work)
    (work / "repository").rename(folder / "repository")
    shutil.rmtree(work)


def _inside(root: Path, work: Path, script: str) -> None:
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    enter = ["sh", "-c", _ENTER, "sh", str(root), str(work)]
    clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin", "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"]
    stream([*namespaces, *enter, *clean, "sh", "-c", f"set -e; {script}"], "RPM hosts")


def _install_tools(root: Path, work: Path) -> None:
    """dnf and rpm from Debian, and the newer libraries that the packages were made for."""
    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/mnt/debs ./\n")
    apt_get = "apt-get -y -q -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 --no-install-recommends"
    _inside(
        root,
        work,
        f"{apt_get} update; {apt_get} install {' '.join(TOOLS)}; {apt_get} upgrade",
    )


def _write_packages(root: Path, work: Path) -> None:
    """Unpack what the image lacks, and write down how rpmbuild shall pack it."""
    status = (root / "var/lib/dpkg/status").read_text()
    present = {line.split()[1] for line in status.splitlines() if line.startswith("Package: ")}
    controls = {
        deb: control
        for deb in sorted((work / "debs").glob("*.deb"))
        if (control := run(["dpkg-deb", "--field", str(deb)])) and _name(control) not in present
    }
    unpacked = work / "unpacked"
    unpacked.mkdir()
    for deb, control in controls.items():
        target = unpacked / _name(control)
        run(["dpkg-deb", "--extract", str(deb), str(target)])
        _tidy(target)
    names = {_name(control): _name(control) for control in controls.values()}
    names = {name: fedora.NAMES.get(name, name) for name in names.keys() - fedora.MERGED}
    packages = [*fedora.BASE]
    for one in fedora.BASE:
        fedora.base_files(one.name, work / "payload" / one.name)
    for control in controls.values():
        if _name(control) in names:
            packages.append(_adapted(control, names, work))
    (work / "lists").mkdir()
    for one in packages:
        listed = package.listed(work / "payload" / one.name, one.modes)
        (work / "lists" / one.name).write_text(listed)
    (work / "lab.spec").write_text(package.spec(packages))


def _adapted(control: str, names: Mapping[str, str], work: Path) -> package.Rpm:
    plain = package.from_control(control, names)
    payload = work / "payload" / plain.name
    (work / "unpacked" / _name(control)).rename(payload)
    return fedora.adapt(plain, payload, work / "unpacked")


def _name(control: str) -> str:
    return next(line.split()[1] for line in control.splitlines() if line.startswith("Package: "))


def _tidy(payload: Path) -> None:
    """Drop what no host reads, and put what Debian has in /lib where it lies: in /usr/lib.

    A package that owns a file in /lib takes the link of that name along when it is removed.
    """
    for name in _UNWANTED:
        shutil.rmtree(payload / "usr/share" / name, ignore_errors=True)
    for name in _MERGED_FOLDERS:
        if (payload / name).is_dir():
            (payload / "usr" / name).mkdir(parents=True, exist_ok=True)
            run(["cp", "-a", f"{payload / name}/.", str(payload / "usr" / name)])
            shutil.rmtree(payload / name)


def _make_repository(root: Path, work: Path) -> None:
    settings = {
        "_topdir": "/mnt/rpmbuild",
        "_rpmdir": "/mnt/repository",
        "_build_name_fmt": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
        "_build_id_links": "none",
        "debug_package": "%{nil}",
        "__os_install_post": "%{nil}",
        "_binary_payload": "w1.zstdio",
        "_empty_manifest_terminate_build": "0",
        "_unpackaged_files_terminate_build": "0",
    }
    defines = " ".join(f"--define '{name} {value}'" for name, value in settings.items())
    _inside(
        root,
        work,
        f"rpmbuild -bb --quiet {defines} /mnt/lab.spec; createrepo_c -q /mnt/repository",
    )


def _become_kylin(root: Path, work: Path) -> None:
    """Take Debian's package manager out, put Kylin's release, sshd's unit and dnf's settings in."""
    for name in ("os-release", "debian_version", "issue", "issue.net"):
        (root / "etc" / name).unlink(missing_ok=True)
    (root / "usr/lib/os-release").unlink()
    (root / "etc/rpm").mkdir(exist_ok=True)
    (root / "etc/rpm/macros.kylin").write_text("%_dbpath /var/lib/rpm\n%dist .ky10\n%kylin 10\n")
    (root / "etc/dnf/dnf.conf").write_text(_DNF_CONF)
    (root / "etc/yum.repos.d").mkdir(exist_ok=True)
    (root / "usr/bin/yum").symlink_to("dnf-3")
    base = " ".join(f"/mnt/repository/{one.name}-{one.version}-*.rpm" for one in fedora.BASE)
    _inside(root, work, f"rpm --initdb; rpm -i --nodeps --replacefiles {base}")
    _replace_sshd_unit(root)
    (root / "usr/bin/sh").unlink()
    (root / "usr/bin/sh").symlink_to("bash")
    for pattern in ("usr/bin/apt*", "usr/bin/dpkg*", "usr/bin/debconf*", "usr/sbin/dpkg*"):
        for program in root.glob(pattern):
            program.unlink()
    for folder in ("etc/apt", "var/lib/apt", "var/lib/dpkg", "var/cache/apt", "usr/lib/apt"):
        shutil.rmtree(root / folder)
    run(["systemctl", f"--root={root}", "mask", "dnf-makecache.timer"])


def _replace_sshd_unit(root: Path) -> None:
    """Kylin's unit is sshd.service itself: a unit that is only an alias is never seen to run.

    What is left of ssh.service, its socket or its init script would start a second sshd.
    """
    run(["systemctl", f"--root={root}", "disable", "ssh.service", "ssh.socket"])
    units = root / "usr/lib/systemd/system"
    text = (units / "ssh.service").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("Alias=")]
    (units / "sshd.service").write_text("\n".join(lines) + "\n")
    for name in ("ssh.service", "ssh.socket"):
        (units / name).unlink()
    (root / "etc/systemd/system/sshd.service").unlink(missing_ok=True)
    for script in [root / "etc/init.d/ssh", *root.glob("etc/rc*.d/*ssh")]:
        script.unlink(missing_ok=True)
    run(["systemctl", f"--root={root}", "enable", "sshd.service"])
