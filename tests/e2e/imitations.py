"""Imitations of what installs drivers: only the interfaces, for lab hosts without an accelerator.

The kernel's part (modprobe, modinfo, a module that is loaded at boot) is put on a host by
`imitate_kernel`; installers and packages leave only files and a version behind. Nothing here is
NVIDIA's or Huawei's.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fleet import ssh

from lab.site import GATEWAY

STATE = "/usr/local/lab-driver"
"""On a host: calls (of installers), module (on the disk); fail, slow: how installers behave."""

_MODPROBE = f"""#!/bin/sh
# imitates the kernel's module loader; /run/lab-busy: the module is in use until the next boot
case "$*" in
  *-r*) [ -e /run/lab-busy ] && exit 1
    case "$*" in *" nvidia") umount /proc/driver 2>/dev/null ;; esac; exit 0 ;;
  *nvidia) [ -e /proc/driver/nvidia/version ] && exit 0
    [ -s {STATE}/module ] || exit 1
    mount -t tmpfs none /proc/driver && mkdir /proc/driver/nvidia || exit 1
    m="NVRM version: NVIDIA UNIX x86_64 Kernel Module"
    echo "$m  $(cat {STATE}/module)  Mon Jan  1 00:00:00 UTC 2024" >/proc/driver/nvidia/version ;;
esac
"""

_MODINFO = f"""#!/bin/sh
cat {STATE}/module
"""

_AT_BOOT = """[Unit]
Description=Imitates the module that the kernel loads at boot
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/modprobe nvidia
[Install]
WantedBy=multi-user.target
"""

_NVIDIA = f"""#!/bin/sh
# imitates the interface of NVIDIA's installer
mkdir -p {STATE}; echo "$*" >>{STATE}/calls
case " $* " in *" --silent "*) ;; *) echo "this would ask questions" >&2; exit 1 ;; esac
echo VERSION >{STATE}/module
[ -e {STATE}/slow ] && sleep 8
if [ -e {STATE}/fail ]; then
  echo "ERROR: Unable to build the kernel module." >>/var/log/nvidia-installer.log; exit 1
fi
rm -f /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.*
touch /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.VERSION
exit 0
"""

_ASCEND = f"""#!/bin/sh
# imitates the interface of Huawei's installers
mkdir -p {STATE}; echo "NAME $*" >>{STATE}/calls
case " $* " in *" --quiet "*) ;; *) echo "this would ask questions" >&2; exit 1 ;; esac
mkdir -p $(dirname FILE) && echo "LINE" >FILE
exit CODE
"""

_PADDING = "# " + "x" * 1000 + "\n"


def nvidia_installer(version: str) -> bytes:
    """An installer of the driver's ``version``."""
    return (_NVIDIA.replace("VERSION", version) + _PADDING * 300).encode()


def ascend_installer(name: str, version: str) -> bytes:
    """An installer of ``ascend-driver`` (which ends with exit code 2) or ``cann-toolkit``."""
    base = "/usr/local/Ascend"
    file, line, code = {
        "ascend-driver": (f"{base}/driver/version.info", f"Version={version}", "2"),
        "cann-toolkit": (
            f"{base}/cann/x86_64-linux/ascend_toolkit_install.info",
            f"version={version}",
            "0",
        ),
    }[name]
    text = _ASCEND.replace("NAME", name).replace("FILE", file).replace("LINE", line)
    return text.replace("CODE", code).encode()


def sha256(content: bytes) -> str:
    """The digest that an inventory names."""
    return hashlib.sha256(content).hexdigest()


def imitate_kernel(host: str) -> None:
    """Give a host the imitated module loader, at boot too."""
    files = {
        "/usr/sbin/modprobe": _MODPROBE,
        "/usr/sbin/modinfo": _MODINFO,
        "/etc/systemd/system/lab-module.service": _AT_BOOT,
    }
    script = f"mkdir -p {STATE}\n"
    for path, content in files.items():
        script += f"cat >{path} <<'EOF'\n{content}EOF\nchmod 755 {path}\n"
    ssh(host, script + "systemctl enable -q lab-module.service")


def driver_packages(folder: Path, version: str, fabric_version: str) -> None:
    """Fill ``folder`` with an apt repository: what installers need, a driver, a fabric manager."""
    branch = version.split(".")[0]
    library = f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}"
    _package(folder, f"linux-headers-{platform.release()}", "1", {})
    _package(folder, "dkms", "3.0", {})
    _package(folder, "make", "4.3-lab", {})
    driver = {f"{STATE}/module": f"{version}\n"}
    _package(folder, f"nvidia-headless-{branch}-server", f"{version}-0lab1", driver)
    _package(folder, f"nvidia-utils-{branch}-server", f"{version}-0lab1", {library: ""})
    told = f"Fabric Manager version is : {fabric_version}"
    fabric = {
        "/usr/bin/nv-fabricmanager": f"#!/bin/sh\necho {told}\n",
        "/lib/systemd/system/nvidia-fabricmanager.service": (
            "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
            "ExecStart=/usr/bin/test -e /proc/driver/nvidia/version\n"
            "[Install]\nWantedBy=multi-user.target\n"
        ),
    }
    _package(folder, f"nvidia-fabricmanager-{branch}", f"{version}-0lab1", fabric)
    for command, name in ((["packages", "."], "Packages"), (["release", "."], "Release")):
        index = subprocess.run(
            ["apt-ftparchive", *command], cwd=folder, check=True, capture_output=True
        )
        (folder / name).write_bytes(index.stdout)


def _package(folder: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    root = folder / f"{name}.root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n"
        "Maintainer: lab <lab@example.com>\nDescription: imitation for lab hosts\n"
    )
    for path, content in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(0o755)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(root), f"{folder}/{name}_{version}.deb"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["rm", "-r", str(root)], check=True)


@dataclass
class Server:
    """A web server over a folder; ``cut``: installers end in their middle."""

    url: str
    cut: bool = False
    requests: list[str] = field(default_factory=list)


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve ``folder`` on the lab's bridge, with ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/").removeprefix("./")
            asked = self.headers.get("Range", "")
            server.requests.append(f"{path.name} {asked}".strip())
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            start = int(asked[6:].split("-")[0]) if asked.startswith("bytes=") else 0
            if start >= len(content) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                end = len(content)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
            self.end_headers()
            whole = not (server.cut and path.suffix == ".run")
            self.wfile.write(content[start:] if whole else content[start : len(content) // 2])

        def log_message(self, *_: object) -> None:
            """Nothing on the tests' output."""

    web = ThreadingHTTPServer((GATEWAY, 0), Handler)
    server = Server(f"http://{GATEWAY}:{web.server_port}")
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        web.shutdown()
        web.server_close()
