"""Where the lab lives: its names, addresses and folders, and the file that says what it offers."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fp8fleet.errors import OperatorError
from lab.processes import say

BRIDGE = "br-fp8lab"
GATEWAY = "198.18.0.1"
PREFIX_LENGTH = 24
MIRROR_PORT = 8900
MIRROR_URL = f"http://{GATEWAY}:{MIRROR_PORT}"

DEBIAN, RPM = "debian", "rpm"
FAMILIES = (DEBIAN, RPM)
# By family: what stands before a host's number in its name, the last number of the first host's
# address, and how many there may be.
_PREFIX = {DEBIAN: "lab-", RPM: "lab-rpm-"}
_FIRST_ADDRESS = {DEBIAN: 11, RPM: 211}
MAX_HOSTS = {DEBIAN: 200, RPM: 40}
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class LabHost:
    """One lab host: its name and its IPv4 address on the bridge."""

    name: str
    address: str

    @property
    def family(self) -> str:
        """The kind of its packages: ``debian`` or ``rpm``."""
        return RPM if self.name.startswith(_PREFIX[RPM]) else DEBIAN

    @property
    def number(self) -> int:
        """Its number within its family, from 1."""
        return int(self.name.removeprefix(_PREFIX[self.family]))


class Site(BaseModel):
    """What the running lab offers, as an inventory needs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[LabHost, ...]
    mirror_url: str
    frontend_url: str
    frontend_sha256: str
    channel_url: str
    wheels_url: str
    models_url: str
    debian_url: str
    cmake_url: str
    cmake_sha256: str


def repository() -> Path:
    """Return the root of this checkout."""
    return _REPOSITORY


def lab_dir() -> Path:
    """Return the folder of the lab's running state: disks, keys, pids, site.json."""
    return _REPOSITORY / ".lab"


def cache_dir() -> Path:
    """Return the folder of downloads and builds, which survives a clone."""
    if own := os.environ.get("FP8FLEET_LAB_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8fleet-lab"


def mirror_root() -> Path:
    """Return the folder that the site mirror serves as ``/``."""
    return lab_dir() / "site"


def mirror_log() -> Path:
    """Return the mirror's access log, one line a request."""
    return lab_dir() / "mirror.log"


def client_key() -> Path:
    """Return the private SSH key that opens every lab host's root account."""
    return lab_dir() / "keys" / "client"


def known_hosts() -> Path:
    """Return the known_hosts file with the lab hosts' real keys."""
    return lab_dir() / "known_hosts"


def ssh_config() -> Path:
    """Return the ssh_config(5) file with an entry for each lab host."""
    return lab_dir() / "ssh_config"


def host(n: int, family: str = DEBIAN) -> LabHost:
    """Return a family's lab host number ``n``, counted from 1: ``host(1)`` is lab-1 at 198.18.0.11.

    Raises:
        OperatorError: there is no host of that number.
    """
    if not 1 <= n <= MAX_HOSTS[family]:
        raise OperatorError(f"lab host {n}: expected a number from 1 to {MAX_HOSTS[family]}")
    return LabHost(f"{_PREFIX[family]}{n}", f"198.18.0.{_FIRST_ADDRESS[family] + n - 1}")


def named(name: str) -> LabHost:
    """Return the lab host called ``name``.

    Raises:
        OperatorError: the name is not lab-1 to lab-200 or lab-rpm-1 to lab-rpm-40.
    """
    match = re.fullmatch(r"lab-(rpm-)?([1-9][0-9]{0,2})", name)
    if match is None:
        raise OperatorError(f"lab host {name!r}: expected lab-1, lab-2, ..., or lab-rpm-1, ...")
    return host(int(match[2]), RPM if match[1] else DEBIAN)


def site() -> Site:
    """Return what the running lab offers.

    Raises:
        OperatorError: the lab is not up.
    """
    try:
        return Site.model_validate_json(_site_file().read_bytes())
    except (FileNotFoundError, ValidationError):
        raise OperatorError(
            f"the lab is not up (no valid {_site_file()}): run fp8fleet lab up"
        ) from None


def write_site(offer: Site) -> None:
    """Record what the running lab offers, replacing an older record at once."""
    write_whole(_site_file(), offer.model_dump_json(indent=2) + "\n")


def forget_site() -> None:
    """Remove the record of what the lab offers: from now on the lab is not up."""
    _site_file().unlink(missing_ok=True)


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never a part.

    Args:
        path: the file; its folder is made.
        text: the content, written as UTF-8.
        mode: the file's permission bits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.chmod(mode)
    beside.replace(path)


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, a folder that ``build`` fills the first time it is asked for.

    The folder is filled under another name and renamed, so that ``target`` is whole or absent.
    Callers hold the lab's lock: no other build of the same folder runs.

    Args:
        target: the folder's final path; its name is the key of its content.
        build: called with an empty folder to fill.
    """
    if target.is_dir():
        return target
    beside = target.with_name(target.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    build(beside)
    beside.replace(target)
    return target


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lab's lock: one command at a time changes this checkout's lab or the cache.

    The kernel drops the lock with the process that holds it, however that process ends.
    """
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"waiting for another lab command (pid {lock.read().strip() or 'unknown'}) to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _site_file() -> Path:
    return lab_dir() / "site.json"
