"""One read of the origin for many hosts: network namespaces with shaped links, counts only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lab.fanout import measure


@pytest.mark.lab
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "curl"))),
    reason="network namespaces need root, ip, tc and curl",
)
def test_three_hosts_cost_the_origin_about_one_copy(tmp_path: Path) -> None:
    cost = measure(hosts=3, size=12_000_000, files=3, mbit=200, scratch=tmp_path)
    assert cost.whole == 3
    assert cost.copies <= 1.2
    assert cost.peak_bytes <= 150_000_000
