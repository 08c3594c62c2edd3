"""The lab's network: one bridge with this machine's address on it, and no way out."""

from __future__ import annotations

from pathlib import Path

from fp8fleet.errors import OperatorError
from lab.processes import alive, run
from lab.site import BRIDGE, GATEWAY, PREFIX_LENGTH, lab_dir


def up() -> None:
    """Make the bridge, or complete one that an interrupted run left.

    The bridge's alias names the lab it belongs to, since a machine can have one lab only.

    Raises:
        OperatorError: another checkout's lab is up on this machine.
    """
    owner = _owner()
    if owner is None:
        run(["ip", "link", "add", "name", BRIDGE, "type", "bridge"])
    elif owner not in ("", str(lab_dir())) and _in_use(owner):
        raise OperatorError(
            f"another lab is up on this machine ({owner}): "
            f"run fp8fleet lab down in {Path(owner).parent} first"
        )
    run(["ip", "link", "set", "dev", BRIDGE, "alias", str(lab_dir())])
    run(["ip", "address", "replace", f"{GATEWAY}/{PREFIX_LENGTH}", "dev", BRIDGE])
    run(["ip", "link", "set", "dev", BRIDGE, "up"])


def down() -> None:
    """Remove the bridge if it is this lab's; nothing happens when there is none."""
    if _owner() in ("", str(lab_dir())):
        run(["ip", "link", "delete", "dev", BRIDGE])


def _in_use(owner: str) -> bool:
    """Whether the lab ``owner`` still runs: a session that was ended leaves only the bridge."""
    has_hosts = any(Path(f"/sys/class/net/{BRIDGE}/brif").iterdir())
    return has_hosts or alive(Path(owner) / "mirror.pid") is not None


def is_up() -> bool:
    """Tell whether this lab's bridge exists."""
    return _owner() == str(lab_dir())


def _owner() -> str | None:
    """Return the bridge's alias, "" when it has none, None when there is no bridge."""
    try:
        return Path(f"/sys/class/net/{BRIDGE}/ifalias").read_text().strip()
    except FileNotFoundError:
        return None
