"""Operations: the commands that come out of a host's state, and what they do in a real shell."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import (
    ENGINE,
    FRONTEND,
    INSTANCE,
    MODEL,
    PROXY,
    TOOLS,
    Command,
    RecordedHost,
    asked,
    commands,
    context,
    group,
    host_plan,
    lines,
    owner,
    planned_file,
    run,
)
from pyinfra import logger
from pyinfra.api import FunctionCommand

from fp8fleet.accept import CheckResult
from fp8fleet.measured import read_measured
from fp8fleet.plan import HostPlan, InstancePlan, NodePlan, PlannedDirectory
from fp8fleet.secrets import SecretRef
from roles.accept import operations as accept_operations
from roles.accept.facts import LoggedKvCaches
from roles.accept.operations import endpoint_answers, kv_caches_noted
from roles.conda.operations import engine_environment, frontend, tools_environment
from roles.facts import PathState, PathStates
from roles.model import operations as model_operations
from roles.model.facts import ModelIsWhole
from roles.model.operations import model_files
from roles.nginx.facts import Nginx, NginxState, OurNginxRuns
from roles.nginx.operations import live_configuration
from roles.operations import WORK_LOCK, place, streamed
from roles.vllm.facts import Server, ServerState, UnitNames
from roles.vllm.operations import follow, nodes_together, serve_instance, stop_unplanned

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA256 of no bytes."""
SECRET = "sk-live-5ecre7"
ABSENT: dict[str, PathState] = {}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator is warned of."""
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    return said


# place


def real_states(paths: list[str]) -> dict[str, PathState]:
    states = asked(PathStates, paths=paths)
    assert isinstance(states, dict)
    return states


def placed(**arguments: Any) -> list[Command]:
    """The commands of ``place`` on this machine as it is."""
    return commands(place, {PathStates: lambda paths: real_states(paths)}, **arguments)


def do_place(**arguments: Any) -> int:
    """Run ``place`` here; returns the number of commands."""
    found = placed(**arguments)
    for command in found:
        result = run(command)
        assert result.returncode == 0, result.stderr
    return len(found)


def test_nothing_to_place_asks_nothing() -> None:
    assert commands(place, {}) == []


def test_all_states_are_one_fact(tmp_path: Path) -> None:
    host = RecordedHost({PathStates: ABSENT})
    files = [planned_file(tmp_path / name) for name in "abc"]
    with context(host):
        list(place._inner(files=files, directories=[PlannedDirectory("/d")]))
    assert [fact for fact, _ in host.asked] == [PathStates]
    assert host.asked[0][1]["paths"] == ["/d", *[file.path for file in files]]


def test_a_file_is_placed_once(tmp_path: Path) -> None:
    file = planned_file(tmp_path / "it's a $file", bytes(range(256)) * 300, mode="640")
    assert do_place(files=[file]) == 1
    path = Path(file.path)
    assert path.read_bytes() == file.content
    assert path.stat().st_mode & 0o7777 == 0o640
    assert (path.owner(), path.group()) == (owner(), group())
    assert do_place(files=[file]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_empty_file_is_placed(tmp_path: Path) -> None:
    file = planned_file(tmp_path / "empty", b"")
    assert do_place(files=[file]) == 1
    assert Path(file.path).read_bytes() == b""
    assert do_place(files=[file]) == 0


@pytest.mark.parametrize(
    ("mode", "content"), [("644", b"other\n"), ("600", b"text\n"), ("600", b"other\n")]
)
def test_changed_content_or_mode_is_one_command_and_then_none(
    tmp_path: Path, mode: str, content: bytes
) -> None:
    do_place(files=[planned_file(tmp_path / "f", b"text\n", mode="644")])
    other = planned_file(tmp_path / "f", content, mode=mode)
    assert do_place(files=[other]) == 1
    assert do_place(files=[other]) == 0


@pytest.mark.parametrize("key", ["owner", "group"])
def test_another_owner_is_a_change(key: str) -> None:
    file = planned_file("/x", b"")
    state = PathState("file", "644", file.owner, file.group, EMPTY)
    assert commands(place, {PathStates: {"/x": state}}, files=[file]) == []
    other = replace(state, **{key: "nobody"})
    assert len(commands(place, {PathStates: {"/x": other}}, files=[file])) == 1


def test_only_what_is_not_so_is_placed(tmp_path: Path) -> None:
    files = [planned_file(tmp_path / name, name.encode()) for name in "abc"]
    do_place(files=files)
    (tmp_path / "b").write_text("changed by hand")
    (command,) = placed(files=files)
    assert str(tmp_path / "b") in command.text


def test_a_link_in_a_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "f").symlink_to(tmp_path / "target")
    do_place(files=[planned_file(tmp_path / "f")])
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "f").is_symlink()


def test_a_link_to_a_directory_in_a_files_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "f").symlink_to(tmp_path / "target")
    assert do_place(files=[planned_file(tmp_path / "f")]) == 1
    assert list((tmp_path / "target").iterdir()) == []
    assert not (tmp_path / "f").is_symlink()
    assert do_place(files=[planned_file(tmp_path / "f")]) == 0


def test_a_directory_in_a_files_place_is_a_failure_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (command,) = placed(files=[planned_file(tmp_path / "f")])
    assert run(command).returncode != 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "f"]


def test_content_goes_through_stdin_and_not_through_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8FLEET_TEST_KEY", SECRET)
    reference = SecretRef.parse("env:FP8FLEET_TEST_KEY")
    file = planned_file(
        tmp_path / "key", f"{reference.placeholder}\n".encode(), mode="600", secrets=(reference,)
    )
    (command,) = placed(files=[file])
    assert SECRET not in command.text
    assert base64.b64encode(SECRET.encode()).decode()[:8] not in command.text
    assert command.stdin
    assert base64.b64decode(command.stdin) == f"{SECRET}\n".encode()
    do_place(files=[file])
    assert (tmp_path / "key").read_text() == f"{SECRET}\n"
    assert do_place(files=[file]) == 0


def test_a_secret_file_is_never_readable_by_others_on_its_way(tmp_path: Path) -> None:
    """The file beside is made with umask 077 and gets its mode before its name."""
    (command,) = placed(files=[planned_file(tmp_path / "key", mode="600")])
    assert command.text.startswith("umask 077; base64 -d >")
    assert command.text.index("chmod 600") < command.text.index("mv -fT")


def test_a_killed_runs_leftover_is_overwritten(tmp_path: Path) -> None:
    file = planned_file(tmp_path / "f")
    (tmp_path / "f.fp8fleet-new").write_text("half a fi")
    assert do_place(files=[file]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "text\n"


def test_a_file_that_its_check_refuses_never_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("the old one")
    file = planned_file(tmp_path / "f", b"bad\n")
    (command,) = placed(files=[file], check="grep -q good {}")
    assert run(command).returncode != 0
    assert (tmp_path / "f").read_text() == "the old one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_file_that_its_check_accepts_gets_its_name(tmp_path: Path) -> None:
    file = planned_file(tmp_path / "f", b"good\n")
    assert do_place(files=[file], check="grep -q good {}") == 1
    assert (tmp_path / "f").read_text() == "good\n"


def test_a_file_whose_folder_is_missing_is_a_failure(tmp_path: Path) -> None:
    (command,) = placed(files=[planned_file(tmp_path / "none/f")])
    assert run(command).returncode != 0


def directory(path: Path, mode: str = "755") -> PlannedDirectory:
    return PlannedDirectory(str(path), mode, owner(), group())


def test_a_directory_is_made_with_its_mode_once(tmp_path: Path) -> None:
    wanted = [directory(tmp_path / "a b"), directory(tmp_path / "a b/c", "750")]
    assert do_place(directories=wanted) == 2
    assert (tmp_path / "a b/c").stat().st_mode & 0o777 == 0o750
    assert do_place(directories=wanted) == 0


def test_a_directorys_mode_is_set_right(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    assert do_place(directories=[directory(tmp_path / "d")]) == 1
    assert do_place(directories=[directory(tmp_path / "d")]) == 0


def test_a_link_to_a_directory_is_as_good_as_one(tmp_path: Path) -> None:
    """Models often lie on a big disk elsewhere, with a link in the usual place."""
    (tmp_path / "big").mkdir(mode=0o755)
    (tmp_path / "models").symlink_to(tmp_path / "big")
    assert do_place(directories=[directory(tmp_path / "models")]) == 0
    (tmp_path / "big").chmod(0o700)
    assert do_place(directories=[directory(tmp_path / "models")]) == 1
    assert (tmp_path / "models").is_symlink()
    assert (tmp_path / "big").stat().st_mode & 0o7777 == 0o755
    assert do_place(directories=[directory(tmp_path / "models")]) == 0


def test_directories_come_before_files(tmp_path: Path) -> None:
    do_place(directories=[directory(tmp_path / "d")], files=[planned_file(tmp_path / "d/f")])
    assert (tmp_path / "d/f").is_file()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator reads while operations run."""
    said: list[str] = []
    monkeypatch.setattr(logger, "info", said.append)
    return said


@pytest.mark.parametrize("executing", [True, False])
def test_each_file_that_changes_is_told_when_it_changes(
    tmp_path: Path, told: list[str], executing: bool
) -> None:
    same, other, new = (planned_file(tmp_path / name) for name in ("same", "other", "new"))
    do_place(files=[same])
    (tmp_path / "other").write_text("of another inventory")
    host = RecordedHost({PathStates: lambda paths: real_states(paths)})
    with context(host, executing):
        assert len(list(place._inner(files=[same, other, new]))) == 2
    said = [f"[gpu-1] {other.path}: changed", f"[gpu-1] {new.path}: new"]
    assert told == (said if executing else [])


def test_a_file_that_must_not_be_there_is_removed_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("it's a $key", "none", "link")]
    (tmp_path / "it's a $key").write_text(SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("kept")
    assert do_place(absent=paths) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]
    assert do_place(absent=paths) == 0


def test_files_and_removals_are_one_fact(tmp_path: Path) -> None:
    host = RecordedHost({PathStates: ABSENT})
    with context(host):
        list(place._inner(files=[planned_file("/a")], absent=("/b",)))
    assert [arguments["paths"] for _, arguments in host.asked] == [["/a", "/b"]]


# streamed


def test_a_long_command_is_shown_and_waits_for_what_a_killed_run_left() -> None:
    command = streamed("make it", {"A": "x y", "B": "$HOME"})
    text = str(command.get_raw_value())
    assert re.fullmatch(
        rf"umask 022; flock --timeout \d+ {WORK_LOCK} env A='x y' B='\$HOME' make it", text
    )


# conda


WHOLE = PathState("file", "644", "root", "root", "")
HALF: dict[str, PathState] = {}


def stamps(*prefixes: str) -> Callable[..., dict[str, PathState]]:
    """A host on which the environments at ``prefixes`` are whole."""
    programs = (FRONTEND.program, TOOLS.interpreter, ENGINE.interpreter)
    whole = [f"{prefix}/.fp8fleet-whole" for prefix in prefixes]
    whole += [program for program in programs if program.startswith(prefixes)]

    def states(paths: list[str]) -> dict[str, PathState]:
        return {path: WHOLE if path in whole else PathState("absent") for path in paths}

    return states


def test_whole_environments_get_no_command() -> None:
    facts = {PathStates: stamps(FRONTEND.prefix or "", TOOLS.prefix, ENGINE.prefix)}
    plan = host_plan()
    for operation in (frontend, tools_environment, engine_environment):
        assert lines(operation, facts, plan=plan) == []


@pytest.mark.parametrize(
    ("operation", "prefix", "program"),
    [
        (frontend, FRONTEND.prefix, FRONTEND.program),
        (tools_environment, TOOLS.prefix, TOOLS.interpreter),
        (engine_environment, ENGINE.prefix, ENGINE.interpreter),
    ],
)
def test_a_stamped_prefix_without_its_program_is_made_anew(
    operation: Callable[..., Any], prefix: str, program: str
) -> None:
    stamp = f"{prefix}/.fp8fleet-whole"
    facts = {PathStates: {stamp: WHOLE, program: PathState("absent")}}
    assert f"rm -rf {prefix}" in lines(operation, facts, plan=host_plan())[0]


@pytest.mark.parametrize(
    ("operation", "prefix"),
    [
        (frontend, FRONTEND.prefix),
        (tools_environment, TOOLS.prefix),
        (engine_environment, ENGINE.prefix),
    ],
)
def test_what_is_not_whole_is_made_anew_and_stamped_last(
    operation: Callable[..., Any], prefix: str
) -> None:
    found = lines(operation, {PathStates: HALF}, plan=host_plan())
    # Removing, too, waits for what a killed run left working.
    assert found[0].startswith(f"umask 022; flock --timeout 1800 {WORK_LOCK} env ")
    assert f"rm -rf {prefix}" in found[0]
    assert found[-1] == f"sync && touch {prefix}/.fp8fleet-whole"
    assert not [line for line in found[:-1] if ".fp8fleet-whole" in line]


def test_a_frontend_that_hosts_have_is_left_alone() -> None:
    plan = host_plan(frontend=replace(FRONTEND, prefix=None, url=None, sha256=None))
    assert lines(frontend, {}, plan=plan) == []


def test_a_frontend_is_fetched_checked_and_then_run() -> None:
    found = lines(frontend, {PathStates: HALF}, plan=host_plan())
    kinds = ["rm -rf", "curl --fail", "sha256sum -c", " -b -p ", "rm -f", "touch"]
    assert len(found) == len(kinds)
    for line, kind in zip(found, kinds, strict=True):
        assert kind in line
    assert str(FRONTEND.sha256) in found[2]


def test_a_frontend_that_is_a_program_is_installed_under_its_name() -> None:
    program = replace(FRONTEND, url="https://m.example.com/micromamba")
    found = lines(frontend, {PathStates: HALF}, plan=host_plan(frontend=program))
    download = f"{FRONTEND.prefix}.download"
    assert f"install -m 755 {download} {FRONTEND.program}" in found


def frontend_check(folder: Path, content: bytes, sha256: str) -> Any:
    """Run the digest check of a fetched frontend."""
    (folder / "d1.download").write_bytes(content)
    front = replace(FRONTEND, prefix=f"{folder}/d1", sha256=sha256)
    found = lines(frontend, {PathStates: HALF}, plan=host_plan(frontend=front))
    return run(next(line for line in found if "sha256sum -c" in line))


def test_a_frontend_with_the_right_digest_passes(tmp_path: Path) -> None:
    assert frontend_check(tmp_path, b"", EMPTY).returncode == 0


def test_a_frontend_with_another_digest_is_removed_and_both_digests_are_said(
    tmp_path: Path,
) -> None:
    result = frontend_check(tmp_path, b"<html>", "ab" * 32)
    assert result.returncode == 1
    assert "conda_frontend_url: expected SHA256 " + "ab" * 32 in result.stderr
    assert f"got: {hashlib.sha256(b'<html>').hexdigest()}" in result.stderr
    assert not (tmp_path / "d1.download").exists()


def test_tools_are_filled_by_pip_and_the_engine_by_the_tools_uv() -> None:
    plan = host_plan()
    tools = " ".join(lines(tools_environment, {PathStates: HALF}, plan=plan))
    engine = " ".join(lines(engine_environment, {PathStates: HALF}, plan=plan))
    assert f"{TOOLS.prefix}/bin/python -m pip install" in tools
    assert f"{TOOLS.prefix}/bin/uv pip install --python {ENGINE.prefix}/bin/python" in engine
    for text in (tools, engine):
        assert "--require-hashes" in text
        assert "--index-url=https://m.example.com/simple?a&b" in shlex.split(text)


def test_an_environment_takes_only_its_channels() -> None:
    found = lines(engine_environment, {PathStates: HALF}, plan=host_plan())
    create = shlex.split(found[1])
    start = create.index("create")
    assert create[start - 1] == FRONTEND.program
    assert create[start:] == [
        *("create", "-y", "-q", "-p", ENGINE.prefix, "--override-channels"),
        *("-c", "https://m.example.com/conda", "-c", "a b"),
        *("python=3.12", "cuda-nvcc=13.0", "ninja"),
    ]


def test_an_engine_is_proved_by_its_import_before_its_stamp() -> None:
    found = lines(engine_environment, {PathStates: HALF}, plan=host_plan())
    proof = next(i for i, line in enumerate(found) if "import vllm" in line)
    assert "VLLM_TARGET_DEVICE=cpu" in found[proof]
    assert proof > next(i for i, line in enumerate(found) if "uv pip install" in line)


def test_pins_come_before_the_engine() -> None:
    pinned = replace(ENGINE, pins="/etc/f/pins.txt")
    found = lines(engine_environment, {PathStates: HALF}, plan=host_plan(engine=pinned))
    installs = [line for line in found if "uv pip install" in line]
    assert installs[0].endswith("--no-deps -r /etc/f/pins.txt")
    assert installs[1].endswith("-r /etc/f/engine.txt")


@pytest.mark.parametrize(("build", "compiles"), [("wheel", False), ("source", True)])
def test_wheels_only_unless_the_engine_is_built(build: str, compiles: bool) -> None:
    engine = replace(ENGINE, build=build)
    found = " ".join(lines(engine_environment, {PathStates: HALF}, plan=host_plan(engine=engine)))
    assert ("--only-binary :all:" not in found) is compiles


def test_a_gateway_gets_no_engine() -> None:
    assert lines(engine_environment, {}, plan=host_plan(engine=None)) == []


# model


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The run's switches."""
    switches = SimpleNamespace(verify_full=False)
    monkeypatch.setattr(model_operations, "current", lambda: switches)
    yield switches


def test_a_whole_model_is_left_alone(session: SimpleNamespace) -> None:
    assert lines(model_files, {ModelIsWhole: True}, plan=host_plan()) == []


PROGRAM = "/opt/f/tools/t1/bin/python /opt/f/bin/fp8fleet.pyz"
INSPECT = f"{PROGRAM} inspect /models/tiny/1 --manifest /etc/f/models/tiny-1.toml"


def test_a_model_that_is_not_whole_is_fetched_and_inspected_with_visible_progress(
    session: SimpleNamespace,
) -> None:
    fetched, forgotten, inspected = commands(model_files, {ModelIsWhole: False}, plan=host_plan())
    assert fetched.streamed
    assert inspected.streamed
    assert forgotten.text == "rm -f /run/fp8fleet/main.started"
    assert fetched.text.endswith(f"{PROGRAM} fetch /etc/f/models/tiny-1.toml /models/tiny/1")
    assert inspected.text.endswith(INSPECT)


@pytest.mark.parametrize("full", [True, False])
def test_the_question_is_the_inspection_that_the_operation_ends_with(
    session: SimpleNamespace, full: bool
) -> None:
    session.verify_full = full
    asked: list[str] = []

    def whole(inspect: str) -> bool:
        asked.append(inspect)
        return False

    plan = host_plan(model=replace(MODEL, headers="/etc/f/h.json"))
    last = lines(model_files, {ModelIsWhole: whole}, plan=plan)[-1]
    assert asked == [f"{INSPECT} --headers /etc/f/h.json{' --full' if full else ''}"]
    assert last.endswith(asked[0])


def test_a_models_token_is_named_by_its_file(session: SimpleNamespace) -> None:
    plan = host_plan(model=replace(MODEL, token="/etc/f/t.token"), ca_bundle="/etc/ca.pem")
    command, *_ = lines(model_files, {ModelIsWhole: False}, plan=plan)
    assert "--token file:/etc/f/t.token --ca-bundle /etc/ca.pem" in command


def test_the_host_that_gets_a_models_token_is_quoted(session: SimpleNamespace) -> None:
    model = replace(MODEL, token="/etc/f/t.token", token_for="https://h/a;b&c")
    command, *_ = lines(model_files, {ModelIsWhole: False}, plan=host_plan(model=model))
    assert "--token-for 'https://h/a;b&c'" in command


def test_a_gateway_gets_no_model(session: SimpleNamespace) -> None:
    assert lines(model_files, {}, plan=host_plan(model=None)) == []


# vllm


PLANNED = [
    planned_file(path, b"as planned\n", role="vllm")
    for path in ("/etc/systemd/system/u", "/etc/f/main.yaml", "/etc/f/main.env")
]
SERVER = replace(INSTANCE, files=tuple(file.path for file in PLANNED))
STARTED_FROM = {file.path: hashlib.sha256(file.content).hexdigest() for file in PLANNED}
FINE = ServerState(
    active=True,
    enabled=True,
    needs_reload=False,
    started_from=STARTED_FROM,
    ready=True,
    port_holder=None,
)
OTHER_YAML = {**STARTED_FROM, "/etc/f/main.yaml": EMPTY}
RELOAD = "systemctl daemon-reload"
ENABLE = "systemctl enable --quiet fp8fleet-main.service"
RESET = "systemctl reset-failed fp8fleet-main.service 2>/dev/null || true"
RESTART = "systemctl restart fp8fleet-main.service"
READY = "ready"


def served_plan() -> HostPlan:
    """The plan of a host with ``SERVER``'s files among others."""
    return host_plan(files=(planned_file("/etc/other"), *PLANNED), instances=(SERVER,))


def served(state: ServerState) -> list[str]:
    """The commands for a server in ``state``, shortened."""
    found = lines(serve_instance, {Server: state}, plan=served_plan(), instance=SERVER)
    short = [re.sub(r"^umask 022; flock --timeout \d+ \S+ env +", "", line) for line in found]
    return [READY if ".pyz ready " in line else line for line in short]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"enabled": False}, [ENABLE]),
        ({"ready": False}, [READY]),
        ({"ready": False, "enabled": False}, [ENABLE, READY]),
        ({"started_from": OTHER_YAML}, [RESET, RESTART, READY]),
        ({"started_from": {}}, [RESET, RESTART, READY]),
        ({"started_from": {**STARTED_FROM, "/etc/f/more": EMPTY}}, [RESET, RESTART, READY]),
        ({"started_from": OTHER_YAML, "ready": False}, [RESET, RESTART, READY]),
        ({"needs_reload": True, "started_from": OTHER_YAML}, [RELOAD, RESET, RESTART, READY]),
        ({"needs_reload": True}, [RELOAD]),
        ({"active": False, "ready": False}, [RELOAD, RESET, RESTART, READY]),
        ({"active": False}, [RELOAD, RESET, RESTART, READY]),
        (
            {"active": False, "enabled": False, "started_from": {}, "ready": False},
            [RELOAD, ENABLE, RESET, RESTART, READY],
        ),
    ],
)
def test_a_server_gets_what_its_state_lacks_and_no_more(
    change: dict[str, Any], expected: list[str]
) -> None:
    assert served(replace(FINE, **change)) == expected


def test_a_renamed_server_is_stopped_before_the_new_one_takes_its_port() -> None:
    bare = replace(Server.default(), port_holder="fp8fleet-old.service")
    stop = "systemctl stop fp8fleet-old.service"
    assert served(bare) == [RELOAD, ENABLE, stop, RESET, RESTART, READY]


@pytest.mark.parametrize("holder", [None, SERVER.unit])
def test_the_server_itself_or_a_foreign_holder_of_the_port_is_not_stopped(
    holder: str | None,
) -> None:
    changed = replace(FINE, started_from=OTHER_YAML, port_holder=holder)
    assert served(changed) == [RESET, RESTART, READY]


def test_a_server_that_stays_stops_nobody() -> None:
    assert served(replace(FINE, port_holder="fp8fleet-old.service")) == []


def test_a_start_and_its_wait_are_shown_as_they_run() -> None:
    bare = Server.default()
    found = commands(serve_instance, {Server: bare}, plan=served_plan(), instance=SERVER)
    assert [command.streamed for command in found[-2:]] == [True, True]


def test_a_server_that_was_started_with_another_key_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The digests are those of the files with their secrets, as the host has them."""
    reference = SecretRef.parse("env:FP8FLEET_TEST_KEY")
    content = f"KEY={reference.placeholder}\n".encode()
    file = planned_file("/etc/f/main.env", content, secrets=(reference,))
    plan = host_plan(files=(file,))
    server = replace(INSTANCE, files=(file.path,))
    started = {file.path: hashlib.sha256(f"KEY={SECRET}\n".encode()).hexdigest()}
    facts = {Server: replace(FINE, started_from=started)}
    monkeypatch.setenv("FP8FLEET_TEST_KEY", SECRET)
    assert lines(serve_instance, facts, plan=plan, instance=server) == []
    monkeypatch.setenv("FP8FLEET_TEST_KEY", "sk-0ther")
    found = lines(serve_instance, facts, plan=plan, instance=server)
    assert [RESTART in line for line in found] == [False, True, False]


def ready_words(**changes: Any) -> list[str]:
    facts = {Server: replace(FINE, ready=False)}
    instance = replace(SERVER, **changes)
    (command,) = lines(serve_instance, facts, plan=served_plan(), instance=instance)
    return shlex.split(command)


def test_readiness_is_asked_with_the_instances_own_settings() -> None:
    words = ready_words()
    assert words[words.index("ready") :] == [
        "ready",
        *("--unit", "fp8fleet-main.service", "--url", "http://127.0.0.1:8000", "--model", "tiny"),
        *("--timeout", "1800", "--warm-up", "16", "--marker", "/run/fp8fleet/main.ready"),
    ]


@pytest.mark.parametrize("model_id", ["a b", "bob's", "$HOME", '"x"', "a;reboot", "org/模型"])
def test_a_model_id_reaches_the_tool_as_it_is(model_id: str) -> None:
    words = ready_words(model_id=model_id)
    assert words[words.index("--model") + 1] == model_id


def test_the_key_is_named_by_its_file() -> None:
    words = ready_words(key_file="/etc/fp8fleet/instances/main.key")
    assert words[-2:] == ["--api-key-file", "/etc/fp8fleet/instances/main.key"]


def test_the_state_is_asked_with_the_check_that_changes_nothing() -> None:
    seen: list[str] = []

    def server(unit: str, instance: str, port: int, check: str) -> ServerState:
        assert (unit, instance, port) == (SERVER.unit, SERVER.name, SERVER.port)
        seen.append(check)
        return FINE

    assert lines(serve_instance, {Server: server}, plan=served_plan(), instance=SERVER) == []
    assert seen[0].endswith("--check")
    assert "flock" not in seen[0]


def test_planned_servers_are_not_stopped() -> None:
    facts = {UnitNames: ["fp8fleet-main.service"]}
    assert lines(stop_unplanned, facts, plan=host_plan()) == []
    assert lines(stop_unplanned, {UnitNames: []}, plan=host_plan()) == []


def test_an_unplanned_server_is_stopped_and_its_files_are_removed() -> None:
    facts = {UnitNames: ["fp8fleet-main.service", "fp8fleet-old.v1.service"]}
    stop, remove = commands(stop_unplanned, facts, plan=host_plan())
    assert stop.streamed
    assert stop.text.endswith("systemctl disable --now fp8fleet-old.v1.service")
    words = shlex.split(remove.text)
    assert words[:2] == ["rm", "-f"]
    assert words[words.index("&&") :] == ["&&", "systemctl", "daemon-reload"]
    assert set(words[2 : words.index("&&")]) == {
        "/etc/systemd/system/fp8fleet-old.v1.service",
        "/etc/fp8fleet/instances/old.v1.yaml",
        "/etc/fp8fleet/instances/old.v1.env",
        "/etc/fp8fleet/instances/old.v1.key",
        "/run/fp8fleet/old.v1.started",
        "/run/fp8fleet/old.v1.ready",
    }


def test_a_host_that_serves_no_more_loses_every_server() -> None:
    facts = {UnitNames: ["fp8fleet-a.service", "fp8fleet-b.service"]}
    found = lines(stop_unplanned, facts, plan=host_plan(instances=()))
    assert len([line for line in found if "disable --now" in line]) == 2


@pytest.mark.parametrize(
    ("gateways", "active", "stops"),
    [
        ((), ["gpu-1"], True),
        (("gw-1",), ["gpu-1", "gw-1"], True),
        (("gw-1",), ["gpu-1"], False),
        (("gw-1",), ["gpu-1", "gpu-2"], False),
        (("gw-1", "gw-2"), ["gpu-1", "gw-1", "gw-2"], True),
        (("gw-1", "gw-2"), ["gpu-1"], False),
        (("gw-1", "gw-2"), ["gpu-1", "gw-1"], False),
    ],
)
def test_a_server_that_a_gateway_outside_the_run_may_still_ask_is_not_stopped(
    gateways: tuple[str, ...], active: list[str], stops: bool
) -> None:
    facts = {UnitNames: ["fp8fleet-old.service"]}
    plan = host_plan(gateways=gateways)
    assert bool(commands(stop_unplanned, facts, run=active, plan=plan)) is stops


# servers over several hosts


NODE = NodePlan("pair", 1, ("gpu-1", "gpu-2"), ("10.0.0.1", "10.0.0.2"), 29501, "d1")
"""This host follows gpu-1."""
HEAD = replace(SERVER, node=replace(NODE, rank=0))
FOLLOWER = replace(SERVER, node=NODE)
BOTH = ["gpu-1", "gpu-2"]


def nodes(operation: Any, instance: InstancePlan, run: list[str], **change: Any) -> list[str]:
    """What an operation asks for, or says, on a host with one node in a run on ``run``."""
    plan = replace(served_plan(), instances=(instance,))
    arguments = {"instance": instance} if operation is serve_instance else {}
    host = RecordedHost({Server: replace(FINE, **change)})
    with context(host, run=run):
        found = list(operation._inner(plan=plan, **arguments))
    texts = []
    for command in found:
        if isinstance(command, FunctionCommand):
            assert not command.function(None, host)
        else:
            texts.append(str(command.get_raw_value()))
    return [re.sub(r"^umask 022; flock --timeout \d+ \S+ env +", "", t) for t in texts + host.said]


def test_a_follower_is_restarted_and_not_waited_for() -> None:
    assert nodes(follow, FOLLOWER, BOTH) == []
    assert nodes(follow, FOLLOWER, BOTH, started_from=OTHER_YAML) == [RESET, RESTART]
    assert nodes(follow, HEAD, BOTH, started_from=OTHER_YAML) == []


def test_a_head_is_waited_for_like_any_server() -> None:
    restart = nodes(serve_instance, HEAD, BOTH, started_from=OTHER_YAML)
    assert restart[:2] == [RESET, RESTART]
    assert " ready " in restart[2]


@pytest.mark.parametrize("instance", [HEAD, FOLLOWER])
def test_a_node_is_not_changed_in_a_run_without_the_others(instance: InstancePlan) -> None:
    (told,) = nodes(nodes_together, instance, ["gpu-1"], started_from=OTHER_YAML)
    assert "gpu-2 of group pair failed or is left out of this run (--limit)" in told
    assert told.endswith("run on gpu-1, gpu-2")
    assert nodes(nodes_together, instance, BOTH, started_from=OTHER_YAML) == []
    assert nodes(nodes_together, instance, ["gpu-1"]) == []


def test_a_head_does_not_wait_for_a_node_whose_host_has_failed() -> None:
    (told,) = nodes(serve_instance, HEAD, ["gpu-1"], ready=False)
    assert "gpu-2 of group pair failed" in told
    assert nodes(serve_instance, HEAD, ["gpu-1"]) == []


# nginx


LIVE = NginxState(active=True, enabled=True, digest=PROXY.digest)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (LIVE, []),
        (replace(LIVE, enabled=False), ["enable"]),
        (replace(LIVE, digest="another"), ["reload", "wait"]),
        (replace(LIVE, digest=None), ["reload", "wait"]),
        (replace(LIVE, active=False), ["restart", "wait"]),
        (NginxState(False, False, None), ["enable", "restart", "wait"]),
    ],
)
def test_nginx_gets_what_its_state_lacks_and_no_more(
    state: NginxState, expected: list[str]
) -> None:
    found = lines(live_configuration, {Nginx: state}, proxy=PROXY)
    short = [line.split()[1] if line.startswith("systemctl") else "wait" for line in found]
    assert short == expected


def test_a_host_without_a_planned_proxy_keeps_no_nginx_of_ours() -> None:
    stop = ["systemctl disable --now --quiet nginx.service"]
    assert lines(live_configuration, {OurNginxRuns: True}, proxy=None) == stop
    assert lines(live_configuration, {OurNginxRuns: False}, proxy=None) == []


def wait_command(folder: Path, answer: str) -> Any:
    """Run the wait for the live configuration with a curl that answers ``answer``."""
    (folder / "curl").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (folder / "curl").chmod(0o755)
    (folder / "sleep").write_text("#!/bin/sh\n")
    (folder / "sleep").chmod(0o755)
    found = lines(live_configuration, {Nginx: NginxState(True, True, None)}, proxy=PROXY)
    return run(f"PATH={folder}:$PATH; {found[-1]}")


def test_a_configuration_that_is_live_ends_the_wait(tmp_path: Path) -> None:
    assert wait_command(tmp_path, PROXY.digest).returncode == 0


@pytest.mark.parametrize("answer", ["", "another", "<html> [x] </html>"])
def test_a_configuration_that_is_not_live_fails_with_nginxs_own_words(
    tmp_path: Path, answer: str
) -> None:
    result = wait_command(tmp_path, answer)
    assert result.returncode == 1
    assert "Nginx does not serve the new configuration" in result.stderr


# accept


def accepted(
    monkeypatch: pytest.MonkeyPatch, *passed: bool, executing: bool = True
) -> tuple[list[FunctionCommand], list[tuple[Any, ...]]]:
    """The commands of acceptance and the calls of the checks, with these results."""
    calls: list[tuple[Any, ...]] = []

    def check(*arguments: Any) -> list[CheckResult]:
        calls.append(arguments)
        return [CheckResult(f"check {i}", ok, "said so", 0.1) for i, ok in enumerate(passed)]

    monkeypatch.setattr(accept_operations, "check_endpoint", check)
    with context(RecordedHost({}), executing):
        return list(endpoint_answers._inner(proxy=PROXY)), calls


def test_acceptance_that_passes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = accepted(monkeypatch, True, True)
    assert found == []
    assert [call[:3] for call in calls] == [(PROXY.url, PROXY.model_id, None)]


def test_a_host_without_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_operations, "check_endpoint", None)
    with context(RecordedHost({}), executing=True):
        assert list(endpoint_answers._inner(proxy=None)) == []


def test_acceptance_asks_nothing_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accepted(monkeypatch, False, executing=False) == ([], [])


def test_acceptance_that_fails_fails_the_host_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (command,), _ = accepted(monkeypatch, True, False, False)
    host = RecordedHost({})
    assert command.function(None, host, *command.args, **command.kwargs) is False
    assert host.said == ["acceptance: http://10.0.0.1:8080: check 1: said so"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pyinfra runs in, with reports/ below it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def noted(sizes: dict[str, int], executing: bool = True) -> RecordedHost:
    """A host whose servers' logs tell these sizes, after they were noted."""
    host = RecordedHost({LoggedKvCaches: sizes})
    with context(host, executing):
        for command in kv_caches_noted._inner(plan=host_plan()):
            assert command.function(None, host, *command.args, **command.kwargs) is False
    return host


def test_what_a_server_logged_is_noted_with_its_settings(project: Path) -> None:
    noted({"fp8fleet-main.service": 123_456})
    (entry,) = read_measured(project / "reports/measured.toml")
    capacity = host_plan().instances[0].capacity
    assert capacity is not None
    assert (entry.kv_tokens, entry.combination) == (123_456, capacity.combination)


def test_a_log_that_says_nothing_notes_nothing(project: Path) -> None:
    noted({})
    assert list(project.iterdir()) == []


def test_no_log_is_read_before_the_run(project: Path) -> None:
    assert noted({}, executing=False).asked == []


def test_notes_that_are_broken_fail_the_host_with_their_name(project: Path) -> None:
    (project / "reports").mkdir()
    (project / "reports/measured.toml").write_text("[[measured]]")
    (said,) = noted({"fp8fleet-main.service": 1}).said
    assert "KV cache of fp8fleet-main.service: reports/measured.toml: entry 1: model is" in said
