"""How the lab makes RPMs out of Debian packages, as far as it needs no build."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.rpm import fedora
from lab.rpm.package import Rpm, from_control, listed, spec

NGINX = """\
Package: nginx
Version: 1:1.22.1-9+deb12u11
Architecture: amd64
Pre-Depends: base-tool
Depends: libc6 (>= 2.34), iproute2, nginx-common (<< 2), mail | libnuma1:amd64 (>= 2),
Description: small
 Depends: not this
"""


def test_a_packages_version_release_and_dependencies_are_debians() -> None:
    names = {"nginx": "nginx", "libnuma1": "numactl-libs", "base-tool": "base-tool"}
    package = from_control(NGINX, names)
    assert package == Rpm("nginx", "1.22.1", "9+deb12u11", requires=("base-tool", "numactl-libs"))


def test_a_native_package_has_release_1_and_no_architecture() -> None:
    package = from_control("Package: x\nVersion: 20250419~deb12u2\nArchitecture: all\n", {"x": "x"})
    assert package == Rpm("x", "20250419~deb12u2", "1", noarch=True)


def test_the_spec_file_has_a_section_for_each_package_and_builds_none_of_its_own() -> None:
    text = spec([Rpm("a", "1", "2", requires=("b",)), Rpm("b", "3", noarch=True, before="echo hi")])
    assert "%package -n a\nVersion: 1\nRelease: 2.ky10\n" in text
    assert "Requires: b\n" in text
    assert "%pre -n b\necho hi\n%post -n b\n" in text
    assert "%files -n a -f /mnt/lists/a" in text
    assert "%files\n" not in text


def test_a_package_owns_its_files_and_empty_folders_but_no_folder_that_others_use(
    tmp_path: Path,
) -> None:
    (tmp_path / "usr/lib/x y").mkdir(parents=True)
    (tmp_path / "usr/lib/x y/file").touch()
    (tmp_path / "usr/lib/link").symlink_to("nowhere")
    (tmp_path / "etc/conf.d").mkdir(parents=True)
    (tmp_path / "etc/x.conf").touch()
    (tmp_path / "var/lib/x").mkdir(parents=True)
    lines = listed(tmp_path, {"/var/lib/x": "755, x, root"}).splitlines()
    assert lines == [
        '%dir "/etc/conf.d"',
        '%config(noreplace) "/etc/x.conf"',
        '"/usr/lib/link"',
        '"/usr/lib/x y/file"',
        '%dir %attr(755, x, root) "/var/lib/x"',
    ]


def test_nginx_gets_the_layout_and_the_user_that_rpm_distributions_have(tmp_path: Path) -> None:
    payload, unpacked = tmp_path / "payload", tmp_path / "unpacked"
    (payload / "usr/sbin").mkdir(parents=True)
    (payload / "usr/sbin/nginx").touch()
    common = unpacked / "nginx-common/etc/nginx"
    common.mkdir(parents=True)
    for name in ("mime.types", "fastcgi_params", "uwsgi_params", "scgi_params"):
        (common / name).touch()
    package = fedora.adapt(Rpm("nginx", "1.22.1"), payload, unpacked)
    assert "useradd -r -g nginx" in package.before
    assert (payload / "etc/nginx/conf.d").is_dir()
    assert "include /etc/nginx/conf.d/*.conf;" in (payload / "etc/nginx/nginx.conf").read_text()
    assert not (payload / "etc/nginx/sites-enabled").exists()
    assert (payload / "usr/lib/systemd/system/nginx.service").is_file()


def test_chrony_is_chronyd_with_its_configuration_in_etc(tmp_path: Path) -> None:
    for name in ("usr/bin/chronyc", "usr/sbin/chronyd", "etc/chrony/x", "var/lib/chrony/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    package = fedora.adapt(Rpm("chrony", "4.3"), tmp_path, tmp_path)
    assert "chrony" in package.before
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "etc/chrony.conf",
        "usr/bin/chronyc",
        "usr/sbin/chronyd",
        "usr/lib/systemd/system/chronyd.service",
    }


@pytest.mark.parametrize(
    ("name", "link", "target"),
    [
        ("gcc", "usr/bin/cc", "gcc"),
        ("gcc-c++", "usr/bin/c++", "g++"),
        ("ninja-build", "usr/bin/ninja-build", "ninja"),
    ],
)
def test_compilers_have_the_names_that_build_tools_look_for(
    tmp_path: Path, name: str, link: str, target: str
) -> None:
    fedora.adapt(Rpm(name, "1"), tmp_path, tmp_path)
    assert str((tmp_path / link).readlink()) == target


def test_the_release_says_kylin_v10_sp3(tmp_path: Path) -> None:
    fedora.base_files(fedora.RELEASE, tmp_path)
    assert 'ID="kylin"\nVERSION_ID="V10"' in (tmp_path / "etc/os-release").read_text()
    assert "(SP3)" in (tmp_path / "etc/.productinfo").read_text()
