"""What the end-to-end tests work with: inventories on lab hosts, pyinfra, ssh to look by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from runpy import run_path
from typing import IO, Any

from lab import site
from lab.site import named

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"
NAMES = ("lab-8", "lab-9", "lab-rpm-9")
"""Hosts of the tests: not the ones that a person's demo runs on."""
MAIN, OTHER, RPM = NAMES
FULL = "deploys/full.py"
GROUP_DATA = ("--group-data", "inventories/group_data")


def instance(name: str = "tiny", port: int = 8000, **options: Any) -> dict[str, Any]:
    """The lab's server under another name and port, with ``options`` over its own."""
    data = run_path(str(REPO / "inventories/lab.py"))["_data"]["instances"][0]
    more = {key.replace("_", "-"): value for key, value in options.items()}
    return {"name": name, "port": port, "options": data["options"] | more}


INVENTORY = """
from runpy import run_path
_data = run_path({lab!r})["_data"] | {data!r}
serving = ({hosts!r}, _data)
{more}
"""


@dataclass(frozen=True)
class Done:
    """A program that ended: its exit code and all that it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Standard output and error together."""
        return self.out + self.err

    @property
    def results(self) -> dict[str, Any]:
        """The results of pyinfra's ``--json``."""
        found: dict[str, Any] = json.loads(self.out)["results"]
        return found

    @property
    def changed(self) -> list[str]:
        """Names of the operations that changed a host, from ``--json``."""
        return [op["name"] for op in self.results["operations"] if op["success"]]


def command(
    program: str, *arguments: str, visible: bool = False, env: Mapping[str, str] | None = None
) -> Done:
    """Run a program of this environment in the project's root."""
    done = subprocess.run(
        [str(BIN / program), *arguments],
        cwd=REPO,
        env={**os.environ, **(env or {})},
        capture_output=not visible,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout or "", done.stderr or "")


def announce(text: str) -> None:
    """One line for whoever watches the tests."""
    print(f"\n    [{time.strftime('%H:%M:%S')}] {text}", flush=True)


BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def _ssh(host: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", str(site.ssh_config()), host, script],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )


def ssh(host: str, script: str) -> str:
    """Run a shell script on a lab host and return what it prints; it must succeed."""
    done = _ssh(host, script)
    assert done.returncode == 0, f"{host}: {script}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def until(condition: Callable[[], bool], what: str, patience_s: float = 180.0) -> None:
    """Wait until ``condition`` holds; ``patience_s`` is a bound for a hang, not an expectation."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.3)


def invocation(host: str, instance: str) -> str:
    """The id of a server's present start: another one after every restart."""
    return ssh(host, f"systemctl show -P InvocationID fp8fleet-{instance}.service")


def reboot(host: str) -> None:
    """Reboot a lab host and wait until it answers again."""
    before = ssh(host, BOOT_ID)
    _ssh(host, "systemctl reboot")
    until(lambda: _ssh(host, BOOT_ID).stdout.strip() not in ("", before), "booted again")


def url(host: str, port: int = 8080) -> str:
    """Base URL of a host's proxy."""
    return f"http://{named(host).address}:{port}"


@contextmanager
def served_folder(folder: Path) -> Iterator[str]:
    """Serve a folder on the lab's bridge; yields its URL."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer((site.GATEWAY, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{site.GATEWAY}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@dataclass(frozen=True)
class Fleet:
    """Writes inventories into ``folder`` and runs pyinfra on them."""

    folder: Path
    capture: Any

    def inventory(
        self,
        hosts: Mapping[str, Mapping[str, Any]] | None = None,
        more: str = "",
        **data: Any,
    ) -> str:
        """Write an inventory of lab hosts with ``data`` over the lab's own; returns its path.

        Args:
            hosts: further data by host name; by default the main host alone.
            more: further Python lines, for other groups.
            data: keys of the serving group.
        """
        chosen = hosts if hosts is not None else {MAIN: {}}
        listed = [
            (name, {"ssh_hostname": named(name).address} | dict(own))
            if name.startswith("lab-")
            else (name, dict(own))
            for name, own in chosen.items()
        ]
        path = self.folder / f"inventory_{len(list(self.folder.iterdir()))}.py"
        path.write_text(
            INVENTORY.format(
                lab=str(REPO / "inventories/lab.py"), data=data, hosts=listed, more=more
            )
        )
        return str(path)

    def full(self, inventory: str, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        """``pyinfra -y --json INVENTORY deploys/full.py``."""
        return self.pyinfra(inventory, "-y", "--json", *arguments, env=env)

    def pyinfra(
        self,
        inventory: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        deploy: str = FULL,
    ) -> Done:
        """pyinfra on a deploy; each operation is shown as it begins."""
        with self.capture.global_and_fixture_disabled():
            announce(f"pyinfra {deploy} {' '.join(arguments)}")
            process = self._popen(inventory, *arguments, env=env, deploy=deploy)
            lines: list[str] = []
            reader = threading.Thread(target=_watch, args=(process.stderr, lines), daemon=True)
            reader.start()
            assert process.stdout
            out = process.stdout.read()
            process.wait()
            reader.join()
        return Done(process.returncode, out, "".join(lines))

    def start(self, inventory: str, *arguments: str, deploy: str = FULL) -> subprocess.Popen[str]:
        """Start the same in the background; the caller ends it."""
        return self._popen(inventory, "-y", *arguments, together=True, deploy=deploy)

    @staticmethod
    def _popen(
        inventory: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        together: bool = False,
        deploy: str = FULL,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(BIN / "pyinfra"), *GROUP_DATA, *arguments, inventory, deploy],
            cwd=REPO,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if together else subprocess.PIPE,
            text=True,
        )


def _watch(stream: IO[str], lines: list[str]) -> None:
    """Keep what pyinfra says, and show the operations that it begins and long commands' lines."""
    shown = time.monotonic()
    for line in stream:
        lines.append(line)
        if line.startswith("--> Starting") or time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"      {line.strip()[:110]}", flush=True)
