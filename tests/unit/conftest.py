"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import GATEWAY, REPO, Site

from fp8fleet.inventory import load_fleet
from fp8fleet.plan import FleetPlan
from fp8fleet.planner import make_plan


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A project with one serving host, all right, in a folder of its own."""
    return Site(tmp_path)


@pytest.fixture
def gateway_site(tmp_path: Path) -> Site:
    """A project with two serving hosts behind a gateway."""
    return Site(
        tmp_path,
        hosts={
            "gpu-1": {"ssh_hostname": "10.20.0.1", "service_address": "10.30.0.1"},
            "gpu-2": {"ssh_hostname": "10.20.0.2", "service_address": "10.30.0.2"},
        },
        gateways={"gw-1": {**GATEWAY, "ssh_hostname": "10.20.0.9"}},
    )


@pytest.fixture(scope="session")
def prod() -> FleetPlan:
    """The plan of the worked example."""
    return make_plan(load_fleet(str(REPO / "inventories/prod.py")), REPO)
