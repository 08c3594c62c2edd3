"""A Python package whose wheel comes out of cmake: a small C project, built on the host.

Its build backend is its own and uses the cmake that the build's PATH leads to.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

NAME = "fp8lab_cmake"

_FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["ninja"]
build-backend = "backend"
backend-path = ["."]

[project]
name = "fp8lab-cmake"
version = "1.0"
""",
    "PKG-INFO": "Metadata-Version: 2.1\nName: fp8lab-cmake\nVersion: 1.0\n",
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.26)
project(answer LANGUAGES C CXX)
add_library(answer MODULE answer.c more.cpp)
set_target_properties(answer PROPERTIES PREFIX "")
""",
    "answer.c": "int more(void);\nint answer(void) { return 40 + more(); }\n",
    "more.cpp": 'extern "C" int more(void) { return 2; }\n',
    "backend.py": '''\
import pathlib, shutil, subprocess, zipfile

def build_wheel(directory, settings=None, metadata=None):
    subprocess.run(["cmake", "-G", "Ninja", "-S", ".", "-B", "out"], check=True)
    subprocess.run(["cmake", "--build", "out"], check=True)
    name = "fp8lab_cmake-1.0-py3-none-linux_x86_64.whl"
    code = f"""
import ctypes, pathlib
CMAKE = {shutil.which("cmake")!r}
answer = ctypes.CDLL(str(pathlib.Path(__file__).with_name("answer.so"))).answer
"""
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w") as wheel:
        wheel.write("out/answer.so", "fp8lab_cmake/answer.so")
        wheel.writestr("fp8lab_cmake/__init__.py", code)
        info = "fp8lab_cmake-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", open("PKG-INFO").read())
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-linux_x86_64\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
''',
}


def write_source(folder: Path) -> str:
    """Write the source archive to ``folder`` and return its line for a lock."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name, text in _FILES.items():
            entry = tarfile.TarInfo(f"{NAME}-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    (folder / f"{NAME}-1.0.tar.gz").write_bytes(packed.getvalue())
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    return f"fp8lab-cmake==1.0 \\\n    --hash=sha256:{digest}\n"


def proof() -> str:
    """A shell script that prints what the built library answers and which cmake built it."""
    code = f"import {NAME} as p; print(p.answer(), p.CMAKE)"
    serving = "/proc/$(systemctl show -P MainPID fp8fleet-tiny.service)/exe"
    return f"$(readlink {serving}) -c '{code}'"
