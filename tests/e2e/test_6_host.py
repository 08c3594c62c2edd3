"""The host itself: exact versions from an offline folder, holds, the journal, Nginx's logs.

The tests of this file follow each other on one host.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import complete
from fleet import MAIN, Fleet, invocation, ssh, until, url

from lab import site

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("served")]

FOLDER = "/srv/packages"
"""The offline repository on the host, as a site's disk would hold it."""
OWN = "fp8fleet-lab-tool"
SOURCES = [f"deb [trusted=yes] file://{FOLDER} ./"]
LOG = "/var/log/nginx/access.log"


def repository(folder: Path, *versions: str) -> None:
    """A package in these versions, copied to the host with the index of a flat repository."""
    for version in versions:
        control = folder / f"build-{version}/DEBIAN/control"
        control.parent.mkdir(parents=True)
        control.write_text(
            f"Package: {OWN}\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: the lab <lab@example.com>\nDescription: nothing, in several versions\n"
        )
        target = folder / f"{OWN}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--build", str(control.parent.parent), str(target)], check=True)
    made = "cd $1 && rm -r build-* && apt-ftparchive packages . >Packages"
    made += " && apt-ftparchive release . >Release"
    subprocess.run(["sh", "-c", made, "sh", str(folder)], check=True)
    ssh(MAIN, f"mkdir -p {FOLDER}")
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            subprocess.run(
                ["ssh", "-F", str(site.ssh_config()), MAIN, f"cat >{FOLDER}/{file.name}"],
                stdin=content,
                check=True,
            )


def installed() -> str:
    return ssh(MAIN, f"dpkg-query -W -f '${{Version}}' {OWN}")


def test_a_package_comes_from_an_offline_folder_at_its_version(
    fleet: Fleet, tmp_path: Path
) -> None:
    repository(tmp_path, "1.0", "1.1", "1.2")
    done = fleet.full(fleet.inventory(apt_sources=SOURCES, package_versions={OWN: "1.1"}))
    assert done.code == 0, done.text
    assert installed() == "1.1"
    again = fleet.full(fleet.inventory(apt_sources=SOURCES, package_versions={OWN: "1.1"}))
    assert (again.code, again.changed) == (0, []), again.text


def test_an_older_version_is_installed_though_the_package_is_held_and_stays_held(
    fleet: Fleet,
) -> None:
    held: dict[str, Any] = {"apt_sources": SOURCES, "hold_packages": ["fp8fleet-lab-*"]}
    done = fleet.full(fleet.inventory(package_versions={OWN: "1.1"}, **held))
    assert done.changed == ["Host | Packages that upgrades leave"], done.text
    assert ssh(MAIN, "apt-mark showhold") == OWN
    assert ssh(MAIN, "apt-get -s -q dist-upgrade | grep -c ^Inst || true") == "0"
    done = fleet.full(fleet.inventory(package_versions={OWN: "1.0"}, **held))
    assert done.changed == ["Host | Packages"], done.text
    assert (installed(), ssh(MAIN, "apt-mark showhold")) == ("1.0", OWN)
    done = fleet.full(fleet.inventory(package_versions={OWN: "1.0"}, **held))
    assert (done.code, done.changed) == (0, []), done.text


def test_a_version_that_the_sources_lack_is_one_line_with_those_that_they_have(
    fleet: Fleet,
) -> None:
    held: dict[str, Any] = {"apt_sources": SOURCES, "hold_packages": ["fp8fleet-lab-*"]}
    done = fleet.full(fleet.inventory(package_versions={OWN: "9.9"}, **held))
    assert done.code == 1
    assert (
        f"package {OWN}: version 9.9 (package_versions) is not in the package sources;"
        " they have 1.2, 1.1, 1.0" in done.text
    )
    assert "Traceback" not in done.text
    assert installed() == "1.0"


def test_only_what_fp8fleet_held_is_released_and_the_sites_own_sources_come_back(
    fleet: Fleet,
) -> None:
    ssh(MAIN, "apt-mark hold curl")
    try:
        done = fleet.full(fleet.inventory())
        assert done.code == 0, done.text
        assert ssh(MAIN, "apt-mark showhold") == "curl"
        again = fleet.full(fleet.inventory())
        assert (again.code, again.changed) == (0, []), again.text
    finally:
        ssh(MAIN, "apt-mark unhold curl")


def test_dpkgs_lock_is_awaited(fleet: Fleet) -> None:
    """A package is missing while another program holds dpkg's lock for some seconds."""
    ssh(MAIN, "dpkg --remove --force-depends ninja-build >/dev/null")
    holder = "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w');"
    holder += " g = open('/var/lib/dpkg/lock', 'w');"
    holder += " fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(g, fcntl.LOCK_EX); time.sleep(20)"
    python = "$(ls /opt/fp8fleet/tools/*/bin/python)"
    ssh(MAIN, f'systemd-run --quiet --unit=lock-holder {python} -c "{holder}"')
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    assert ssh(MAIN, "command -v ninja")


def test_a_package_whose_installation_was_cut_off_is_finished(fleet: Fleet) -> None:
    ssh(MAIN, "dpkg --remove --force-depends ninja-build >/dev/null")
    ssh(MAIN, "cd /tmp && apt-get -q download ninja-build && dpkg --unpack ninja-build_*.deb")
    assert ssh(MAIN, "dpkg-query -W -f '${db:Status-Status}' ninja-build") == "unpacked"
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    assert "packages-unfinished" in done.text
    assert ssh(MAIN, "dpkg-query -W -f '${db:Status-Status}' ninja-build") == "installed"


def test_the_journal_is_kept_on_the_disk(fleet: Fleet) -> None:
    assert ssh(MAIN, "ls /var/log/journal/*/system.journal")
    shown = ssh(MAIN, "systemd-analyze cat-config systemd/journald.conf")
    for line in ("Storage=persistent", "SystemMaxUse=4G", "MaxRetentionSec=180day"):
        assert line in shown.splitlines()


def test_logrotate_finds_one_entry_for_nginxs_logs_and_no_error(fleet: Fleet) -> None:
    shown = ssh(MAIN, "logrotate -d /etc/logrotate.conf 2>&1")
    assert "error:" not in shown
    assert shown.count("rotating pattern: /var/log/nginx/*.log") == 1
    twice = ssh(
        MAIN,
        "cp /etc/logrotate.d/nginx /etc/logrotate.d/twice; logrotate -d /etc/logrotate.conf 2>&1;"
        " rm /etc/logrotate.d/twice",
    )
    assert "duplicate log entry" in twice, "what a second entry would do"


def test_a_log_that_is_too_large_is_rotated_and_nginx_writes_to_the_new_one(fleet: Fleet) -> None:
    ssh(MAIN, f"systemctl is-active fp8fleet-logrotate.timer; head -c 30000000 /dev/zero >>{LOG}")
    ssh(MAIN, "systemctl start fp8fleet-logrotate.service")
    assert int(ssh(MAIN, f"stat -c %s {LOG}.1")) >= 30000000
    assert complete(url(MAIN)).status_code == 200
    until(lambda: "/v1/completions" in ssh(MAIN, f"cat {LOG}"), "the request in the new log", 30)
    assert ssh(MAIN, f"stat -c '%a %U %G' {LOG}") == "640 www-data adm"


def test_a_day_later_the_logs_are_rotated_again_and_the_old_one_is_compressed(
    fleet: Fleet,
) -> None:
    ssh(MAIN, "logrotate --force /etc/logrotate.d/nginx")
    assert ssh(MAIN, f"ls {LOG}.2.gz {LOG}.1").split() == [f"{LOG}.1", f"{LOG}.2.gz"]
    done = fleet.full(fleet.inventory())
    assert (done.code, done.changed) == (0, []), done.text


def test_the_clock_of_a_container_is_left(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory(ntp_servers=["198.18.0.1"]))
    assert done.code == 0, done.text
    assert "clock of the machine below" in done.text
    file = "/etc/systemd/timesyncd.conf.d/90-fp8fleet.conf"
    assert "NTP=198.18.0.1" in ssh(MAIN, f"cat {file}")
    done = fleet.full(fleet.inventory())
    assert done.changed == ["Host | Package sources, limits, kernel parameters, logs"], done.text
    assert ssh(MAIN, f"ls {file} 2>&1 || true").endswith("No such file or directory")


def test_after_a_reboot_it_serves_again_and_the_journal_of_the_boot_before_is_there(
    fleet: Fleet,
) -> None:
    started = invocation(MAIN, "tiny")
    reach = ["ssh", "-F", str(site.ssh_config()), "-o", "ConnectTimeout=3", MAIN]
    subprocess.run([*reach, "systemctl reboot"], check=False)

    def is_back() -> bool:
        show = "systemctl show -P InvocationID fp8fleet-tiny.service"
        done = subprocess.run([*reach, show], capture_output=True, text=True, check=False)
        return done.stdout.strip() not in ("", started)

    until(is_back, "the host back")
    until(serves, "it serves again", 300)
    assert int(ssh(MAIN, "journalctl --list-boots --quiet | wc -l")) > 1
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    # the proof of readiness holds for one start of the server
    assert done.changed in ([], ["vLLM | Server 1"])


def serves() -> bool:
    try:
        return complete(url(MAIN)).status_code == 200
    except OSError:
        return False
