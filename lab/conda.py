"""The lab's conda: a channel with python and pip, and an installer as sites have one.

Both are made of Debian 12's python3.11 packages, made relocatable, so that they are the same
whatever machine and Python runs the lab, and work on a host that has none.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import hashlib
import io
import json
import os
import pprint
import re
import shutil
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed
from lab import apt, wheels
from lab.image import build_base
from lab.processes import run, say, stream
from lab.site import build_once

FRONTEND_VERSION = "1.0.0"
FRONTEND = Path(__file__).resolve().parent / "conda_frontend"
LOCK = wheels.LOCKS / "conda.txt"

# The interpreter, its library and headers, and the libraries that they link and a minimal host
# may lack. The C library is the host's.
PACKAGES = (
    *("python3.11", "python3.11-minimal", "libpython3.11", "libpython3.11-dev"),
    *("libpython3.11-minimal", "libpython3.11-stdlib"),
    *("libbz2-1.0", "libcrypt1", "libexpat1", "libffi8", "liblzma5", "libncursesw6"),
    *("libreadline8", "libsqlite3-0", "libssl3", "libtinfo6", "libuuid1", "zlib1g"),
)
LIBC = re.compile(r"(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libutil)\.so\.\d+$")
# Modules of databases and name services that nobody here uses; they would link a dozen libraries.
LEFT_OUT_MODULES = ("_dbm", "nis")
# Debian's own additions to the standard library: its package manager's mark, its hooks.
LEFT_OUT_FILES = ("EXTERNALLY-MANAGED", "_distutils_system_mod.py", "sitecustomize.py")
STDLIB = Path("lib/python3.11")
MULTIARCH = "x86_64-linux-gnu"
PLACEHOLDER = "/fp8fleet-conda-prefix-placeholder"
TIMESTAMP_S = 1_700_000_000  # of every file: the archives depend on content only


@dataclass(frozen=True)
class Member:
    """One entry of an archive: its path, and a file, a link's target or bytes."""

    path: str
    content: bytes
    executable: bool = False
    link: str | None = None


def build_channel(cache: Path) -> Path:
    """Return a conda channel with python 3.11 and pip for linux-64, built the first time.

    The python package holds the C headers and bundles the libraries that it links.

    Args:
        cache: the lab's cache folder.

    Raises:
        CheckFailed: apt or pip cannot get a part, or this release's Python has another form.
    """
    python = _python(cache)
    target = cache / python.name.replace("conda-python", "conda-channel")
    return build_once(target, lambda folder: _build_channel(folder, python, cache))


def build_frontend(cache: Path) -> Path:
    """Return the conda installer, a shell script that carries all it needs, built the first time.

    ``sh INSTALLER -b -p PREFIX`` makes PREFIX/bin/conda, as Miniforge's installer does.

    Args:
        cache: the lab's cache folder.

    Raises:
        CheckFailed: apt or pip cannot get a part, or this release's Python has another form.
    """
    python = _python(cache)
    target = cache / f"conda-frontend-{_digest(python.name, *_texts(FRONTEND.iterdir()))}"
    name = f"fp8fleet-conda-{FRONTEND_VERSION}-linux-64.sh"
    return build_once(target, lambda folder: _build_frontend(folder / name, python, cache)) / name


def _digest(*inputs: str) -> str:
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]


def _texts(files: Iterable[Path]) -> list[str]:
    return [file.read_text() for file in sorted(files) if file.is_file()]


# The relocatable tree


def _python(cache: Path) -> Path:
    """The relocatable tree: bin, lib and include of a prefix, PLACEHOLDER where its path stands."""
    key = _digest(*_texts([Path(__file__), LOCK]))
    return build_once(cache / f"conda-python-{key}", lambda tree: _build_python(tree, cache))


def _build_python(tree: Path, cache: Path) -> None:
    say("conda: a relocatable Python 3.11 out of Debian 12's packages, once")
    unpacked = tree / "unpacked"
    _unpack_packages(unpacked, cache)
    _take_files(unpacked / "usr", tree)
    _take_libraries(unpacked, tree)
    shutil.rmtree(unpacked)
    _undo_distribution_layout(tree)
    _bake_placeholder(tree)
    _add_pip(tree, cache)
    _compile(tree, cache)


def _unpack_packages(unpacked: Path, cache: Path) -> None:
    """Download PACKAGES and unpack them into one tree."""
    scratch = unpacked.with_name("apt")
    (scratch / "debs").mkdir(parents=True)
    apt_get = ["env", "-C", str(scratch / "debs"), "apt-get", *apt.private_options(scratch, cache)]
    environment = {**os.environ, "LC_ALL": "C"}
    stream([*apt_get, "update"], "conda", environment)
    stream([*apt_get, "download", *PACKAGES], "conda", environment)
    for package in sorted((scratch / "debs").glob("*.deb")):
        run(["dpkg-deb", "--extract", str(package), str(unpacked)])
    shutil.rmtree(scratch)


def _take_files(usr: Path, tree: Path) -> None:
    """Copy interpreter, standard library, headers and libpython to where a prefix has them."""
    (tree / "bin").mkdir()
    shutil.copy2(usr / "bin/python3.11", tree / "bin/python3.11")
    for name in ("python", "python3"):
        (tree / "bin" / name).symlink_to("python3.11")
    left_out = shutil.ignore_patterns(
        "config-3.11-*", "test", *LEFT_OUT_FILES, *(f"{name}.*.so" for name in LEFT_OUT_MODULES)
    )
    shutil.copytree(usr / STDLIB, tree / STDLIB, symlinks=True, ignore=left_out)
    shutil.copytree(usr / "include/python3.11", tree / "include/python3.11")
    # The distribution's pyconfig.h only includes the one of the architecture.
    shutil.copy2(usr / "include" / MULTIARCH / "python3.11/pyconfig.h", tree / "include/python3.11")
    shutil.copy2(usr / "lib" / MULTIARCH / "libpython3.11.so.1.0", tree / "lib")
    (tree / "lib/libpython3.11.so").symlink_to("libpython3.11.so.1.0")


def _take_libraries(unpacked: Path, tree: Path) -> None:
    """Copy every library that is linked to lib/, and let each file find the others there."""
    folders = [unpacked / "usr/lib" / MULTIARCH, unpacked / "lib" / MULTIARCH]
    waiting = [tree / "bin/python3.11", tree / "lib/libpython3.11.so.1.0"]
    waiting += sorted((tree / STDLIB / "lib-dynload").glob("*.so"))
    while waiting:
        file = waiting.pop()
        for name in run([_patchelf(), "--print-needed", str(file)]).split():
            if LIBC.match(name) or (tree / "lib" / name).exists():
                continue
            source = next((f / name for f in folders if (f / name).exists()), None)
            if source is None:
                raise CheckFailed(
                    f"conda: {file.name} links {name}, which is in no package of "
                    "PACKAGES in lab/conda.py: add the one that has it"
                )
            shutil.copy(source, tree / "lib" / name)
            waiting.append(tree / "lib" / name)
        origin = os.path.relpath(tree / "lib", file.parent)
        run([_patchelf(), "--set-rpath", f"$ORIGIN/{origin}", str(file)])
        file.chmod(0o755)


def _patchelf() -> str:
    """The patchelf of the environment that runs the lab."""
    return str(Path(sysconfig.get_path("scripts")) / "patchelf")


def _undo_distribution_layout(tree: Path) -> None:
    """Make PREFIX/lib/python3.11/site-packages the place for packages again.

    Debian's Python installs to PREFIX/local/lib/python3.11/dist-packages and imports from
    dist-packages only. It runs the copy of site.py that is frozen into the binaries, where the
    folder's name is a constant of the same length.
    """
    stdlib = tree / STDLIB
    _replace(stdlib / "sysconfig.py", b"'prefix': prefix_scheme,", b"'prefix': 'posix_prefix',")
    _replace(stdlib / "site.py", b'"dist-packages"', b'"site-packages"', count=3)
    for binary in ("bin/python3.11", "lib/libpython3.11.so.1.0"):
        _replace(tree / binary, b"\0dist-packages\0", b"\0site-packages\0")


def _replace(file: Path, old: bytes, new: bytes, count: int = 1) -> None:
    content = file.read_bytes()
    if content.count(old) != count:
        raise CheckFailed(
            f"conda: {file.name} of this release's python3.11 has {content.count(old)} times "
            f"{old!r}, expected {count}: the lab makes its Python out of Debian 12's"
        )
    file.write_bytes(content.replace(old, new))


def _bake_placeholder(tree: Path) -> None:
    """Let the recorded build settings speak of the prefix: compilers take paths from there."""
    file = tree / STDLIB / f"_sysconfigdata__{MULTIARCH}.py"
    settings = ast.literal_eval(file.read_text().split("build_time_vars = ", 1)[1])
    baked = {key: _in_prefix(value) for key, value in settings.items()}
    baked |= {"BINDIR": f"{PLACEHOLDER}/bin", "INCLUDEDIR": f"{PLACEHOLDER}/include"}
    baked["TZPATH"] = settings["TZPATH"]  # time zones are the host's
    file.write_text(f"build_time_vars = {pprint.pformat(baked)}\n")


def _in_prefix(value: object) -> object:
    """``/usr`` and its lib and include become the prefix's; programs and data stay the host's."""
    if not isinstance(value, str):
        return value
    value = value.replace(f"/usr/lib/{MULTIARCH}", "/usr/lib")
    return re.sub(r"(?:(?<![\w.])|(?<=-[IL]))/usr(?=/(?:lib|include)\b|$)", PLACEHOLDER, value)


def _add_pip(tree: Path, cache: Path) -> None:
    packages = tree / STDLIB / "site-packages"
    _unpack_wheel(wheels.fetch(LOCK, cache), "pip", packages)
    for name in ("pip", "pip3", "pip3.11"):
        script = tree / "bin" / name
        script.write_text(
            f"#!{PLACEHOLDER}/bin/python3.11\n"
            "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)


def _unpack_wheel(house: Path, name: str, packages: Path) -> None:
    wheel = next(house.glob(f"{name}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)


def _compile(tree: Path, cache: Path) -> None:
    """Compile all modules: a service's user may not write into the environment.

    The bytecode is never compared with its source, so it stays valid however it is copied.
    The build settings stay text, since installing the package writes the prefix into them.
    """
    options = ["-q", "-j", "0", "-x", "_sysconfigdata", "--invalidation-mode", "unchecked-hash"]
    _run_python(tree, cache, "-I", "-m", "compileall", *options, str(tree / STDLIB))


def _run_python(tree: Path, cache: Path, *arguments: str) -> str:
    """Run the tree's Python with the hosts' C library: this machine's may be older than it needs.

    Options of the loader: ld.so(8).
    """
    libraries = build_base(cache) / "usr/lib" / MULTIARCH
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    return run([*loader, str(tree / "bin/python3.11"), *arguments])


# The channel


def _build_channel(channel: Path, python: Path, cache: Path) -> None:
    from rattler.index import index_fs

    version = _run_python(python, cache, "--version").split()[1]
    members = _members(python)
    pip = [member for member in members if _is_pip(member)]
    rest = [member for member in members if not _is_pip(member)]
    _write_package(channel, "python", version, [f"__glibc >=2.{wheels.GLIBC_MINOR}"], rest)
    # As in real channels, pip is a package of its own.
    _write_package(channel, "pip", _pip_version(pip), [f"python {version}"], pip)
    (channel / "noarch").mkdir()
    # Only repodata.json, which every conda reads.
    asyncio.run(index_fs(channel, write_zst=False, write_shards=False))


def _is_pip(member: Member) -> bool:
    return member.path.startswith((f"{STDLIB}/site-packages/pip", "bin/pip"))


def _pip_version(members: Iterable[Member]) -> str:
    found = (re.search(r"/pip-([0-9.]+)\.dist-info/", member.path) for member in members)
    return next(match[1] for match in found if match)


def _write_package(
    channel: Path, name: str, version: str, depends: list[str], members: list[Member]
) -> None:
    build = "fp8fleet_0"
    index = {
        "arch": "x86_64",
        "build": build,
        "build_number": 0,
        "depends": depends,
        "license": "Python-2.0" if name == "python" else "MIT",
        "name": name,
        "platform": "linux",
        "subdir": "linux-64",
        "timestamp": TIMESTAMP_S * 1000,
        "version": version,
    }
    info = {
        "info/index.json": index,
        "info/paths.json": {"paths": [_path_entry(m) for m in members], "paths_version": 1},
        "info/about.json": {"summary": f"{name} of the fp8fleet lab"},
    }
    metadata = [Member(path, json.dumps(value, indent=1).encode()) for path, value in info.items()]
    metadata.append(Member("info/files", "".join(f"{m.path}\n" for m in members).encode()))
    package = channel / "linux-64" / f"{name}-{version}-{build}.tar.bz2"
    package.parent.mkdir(exist_ok=True)
    with tarfile.open(package, "w:bz2") as archive:
        _write_members(archive, [*metadata, *members])
    say(f"conda: {package.name}, {package.stat().st_size / 1e6:.1f} MB, {len(members)} files")


def _path_entry(member: Member) -> dict[str, object]:
    """An entry of paths.json, version 1 (conda's CEP "Contents of conda packages")."""
    entry: dict[str, object] = {
        "_path": member.path,
        "path_type": "softlink" if member.link else "hardlink",
        "sha256": hashlib.sha256(member.content).hexdigest(),
        "size_in_bytes": len(member.content),
    }
    if PLACEHOLDER.encode() in member.content and not member.link:
        entry |= {"file_mode": "text", "prefix_placeholder": PLACEHOLDER}
    return entry


def _members(root: Path) -> list[Member]:
    """Every file and link below a folder, in order. A link counts as the file that it names."""
    found = []
    for file in sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file()):
        found.append(
            Member(
                path=str(file.relative_to(root)),
                content=file.read_bytes(),
                executable=os.access(file, os.X_OK),
                link=str(file.readlink()) if file.is_symlink() else None,
            )
        )
    return found


def _write_members(archive: tarfile.TarFile, members: Iterable[Member]) -> None:
    for member in members:
        entry = tarfile.TarInfo(member.path)
        entry.mtime = TIMESTAMP_S
        entry.mode = 0o755 if member.executable else 0o644
        if member.link:
            entry.type, entry.linkname = tarfile.SYMTYPE, member.link
            archive.addfile(entry)
        else:
            entry.size = len(member.content)
            archive.addfile(entry, io.BytesIO(member.content))


# The installer


def _build_frontend(installer: Path, python: Path, cache: Path) -> None:
    tree = installer.with_name("tree")
    not_needed = shutil.ignore_patterns("include", "pip", "pip-*", "pip3*", "libpython3.11.so*")
    shutil.copytree(python, tree, symlinks=True, ignore=not_needed)
    packages = tree / STDLIB / "site-packages"
    _unpack_wheel(wheels.fetch(LOCK, cache), "py_rattler", packages)
    _add_certificates(tree, python)
    module = packages / FRONTEND.name
    shutil.copytree(FRONTEND, module, ignore=shutil.ignore_patterns("*.sh", "__pycache__"))
    _compile(tree, cache)
    shutil.copy(FRONTEND / "conda.sh", tree / "bin/conda")
    (tree / "bin/conda").chmod(0o755)
    installer.write_bytes(installer_bytes(_members(tree)))
    shutil.rmtree(tree)
    say(f"conda: {installer.name}, {installer.stat().st_size / 1e6:.1f} MB")


def installer_bytes(members: Iterable[Member]) -> bytes:
    """Return the installer: installer.sh, and from its next line on a tar.gz of a prefix.

    Args:
        members: what PREFIX shall hold.
    """
    script = (FRONTEND / "installer.sh").read_text()
    script = script.replace("@FIRST_LINE@", str(script.count("\n") + 1))
    return script.encode() + _tar_gz(members)


def _add_certificates(tree: Path, python: Path) -> None:
    """Bring the certificate authorities that pip ships: py-rattler does not start without any."""
    (tree / "ssl").mkdir()
    certificates = python / STDLIB / "site-packages/pip/_vendor/certifi/cacert.pem"
    shutil.copy(certificates, tree / "ssl/cacert.pem")


def _tar_gz(members: Iterable[Member]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=TIMESTAMP_S) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        _write_members(archive, members)
    return packed.getvalue()
