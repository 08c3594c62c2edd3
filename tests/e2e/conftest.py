"""The end-to-end tests' fixtures: the lab, brought up once and left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fleet import MAIN, NAMES, Fleet, announce, command

from lab.machine import missing
from lab.mirror import is_up


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """The lab up, for the whole session; down again at its end unless it was up before.

    Where it cannot run the tests are skipped, or fail if FP8FLEET_REQUIRE_LAB=1.
    """
    if reason := missing():
        text = f"the lab cannot run here: {reason}"
        if os.environ.get("FP8FLEET_REQUIRE_LAB") == "1":
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    was_up = is_up()
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        announce("bringing the lab up")
        command("fp8fleet", "lab", "up", visible=True)
    try:
        yield
    finally:
        for name in NAMES:
            command("fp8fleet", "lab", "destroy", name)
        if not was_up:
            command("fp8fleet", "lab", "down")


@pytest.fixture(scope="session")
def fleet(
    lab: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    """Inventories of the tests' own lab hosts, and pyinfra to run on them."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    return Fleet(tmp_path_factory.mktemp("inventory"), capture)


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> None:
    """The main host served by the lab's own inventory, however the file before left it."""
    command("fp8fleet", "lab", "create", MAIN)
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
