"""The documentation: generated pages, links, twins, and that what it names exists."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyinfra.api.arguments import all_argument_meta
from pyinfra.connectors.ssh import connector_data_meta

from fp8fleet import cli, inventory_docs
from fp8fleet.errors import CheckFailed
from fp8fleet.inventory import SWITCHES
from fp8fleet.spec import HostSpec, InstanceSpec, RepositorySpec, SamplingSpec

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
PAGES = sorted([*REPO.glob("README*.md"), *DOCS.rglob("*.md")])
ENGLISH = sorted(DOCS.glob("*.md"))

KEY = re.compile(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?: = [^`]*)?`")
"""A span that looks like an inventory key, alone or with a value."""
NOT_KEYS = {"block_size", "block_structure", "x86_64"} | {
    *(
        "httpd_can_network_connect",
        "httpd_can_network_relay",
        "httpd_setrlimit",
    ),
    *("rope_theta", "rope_parameters", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
    *("http_port_t", "worker_rlimit_nofile", "bin_t", "initrc_t", "unconfined_service_t"),
}
"""Words of checkpoints, vLLM, processors and SELinux's policy that look like keys."""
FOREIGN = {"pyinfra does not connect", "What vLLM says", "pyinfra 无法连接", "vLLM 的消息"}
"""Sections of the troubleshooting page whose messages are not ours."""
FOREIGN_MESSAGES = re.compile(
    r"^(THESE PACKAGES|Hash mismatch|No module|GLIBC_|nginx: |404|import vllm)"
)


def page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def prose_and_code(text: str) -> tuple[str, str]:
    """A page's text without its indented blocks, and those blocks, dedented."""
    lines = text.splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    return "\n".join(line for line in lines if not line.startswith("    ")), code


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose_and_code(text)[0])


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+ .+)$", prose_and_code(text)[0], flags=re.M)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    words = re.sub(r"[^\w\- ]", "", heading.lstrip("# ").strip().lower())
    return words.replace(" ", "-")


def parser_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_the_generated_pages_are_up_to_date() -> None:
    assert inventory_docs.outdated() == []


def test_every_key_has_a_row_in_both_languages() -> None:
    keys = [*HostSpec.model_fields, *InstanceSpec.model_fields, *SWITCHES]
    for text in inventory_docs.render_pages().values():
        rows = re.findall(r"^\| `(\w+)` \|", text, flags=re.M)
        assert [key for key in keys if key not in rows] == []


def test_every_key_of_pyinfra_that_the_page_lists_exists() -> None:
    known = {*connector_data_meta, *all_argument_meta}
    assert [key for key in inventory_docs.PYINFRA_TEXTS if key not in known] == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project that has only what the generated pages are made of and the pages."""
    for path in (
        inventory_docs.CHINESE_TEXTS,
        inventory_docs.ENGLISH_PAGE,
        inventory_docs.CHINESE_PAGE,
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / path, tmp_path / path)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_page_edited_by_hand_is_outdated(copy: Path) -> None:
    change(copy / inventory_docs.ENGLISH_PAGE, "# Inventory keys\n", "# My keys\n")
    assert inventory_docs.outdated(copy) == [inventory_docs.ENGLISH_PAGE]


def test_a_missing_page_is_outdated(copy: Path) -> None:
    (copy / inventory_docs.CHINESE_PAGE).unlink()
    assert inventory_docs.outdated(copy) == [inventory_docs.CHINESE_PAGE]


def test_a_key_without_a_chinese_text_is_refused_by_name(copy: Path) -> None:
    texts = copy / inventory_docs.CHINESE_TEXTS
    change(texts, "\nnofile_limit = ", "\n# nofile_limit = ")
    with pytest.raises(CheckFailed, match=r"\[host\] lacks 'nofile_limit'"):
        inventory_docs.outdated(copy)


def test_a_chinese_text_without_a_key_is_refused_by_name(copy: Path) -> None:
    change(copy / inventory_docs.CHINESE_TEXTS, "[switches]\n", '[switches]\nfast = "快"\n')
    with pytest.raises(CheckFailed, match=r"\[switches\] 'fast': no such key"):
        inventory_docs.outdated(copy)


def test_the_check_says_in_one_line_which_page_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inventory_docs, "outdated", lambda: [inventory_docs.ENGLISH_PAGE])
    assert inventory_docs.main(["--check"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: docs/inventory.md: not what would be generated: run `make docs`\n"


@every_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_and_code(page.read_text())[0]):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), target
        if fragment:
            assert fragment in [anchor(line) for line in headings(file.read_text())], target


@pytest.mark.parametrize("page", ENGLISH, ids=page_id)
def test_every_page_has_a_chinese_twin_with_as_many_headings(page: Path) -> None:
    twin = DOCS / "zh" / page.name
    assert twin.is_file()
    levels = [[line.split()[0] for line in headings(p.read_text())] for p in (page, twin)]
    assert levels[0] == levels[1]


def test_the_readmes_have_as_many_headings() -> None:
    levels = [len(headings((REPO / name).read_text())) for name in ("README.md", "README.zh.md")]
    assert levels[0] == levels[1]


def test_no_chinese_page_lacks_its_english_twin() -> None:
    assert {p.name for p in (DOCS / "zh").glob("*.md")} == {p.name for p in ENGLISH}


@pytest.mark.parametrize("page", ENGLISH, ids=page_id)
def test_twins_show_the_same_commands(page: Path) -> None:
    ours, theirs = (p.read_text() for p in (page, DOCS / "zh" / page.name))
    commands = [
        [line for line in prose_and_code(text)[1].splitlines() if line.isascii()]
        for text in (ours, theirs)
    ]
    if page.name != "architecture.md":  # its block is a drawing with words
        assert commands[0] == commands[1]


@every_page
def test_every_command_of_ours_exists(page: Path) -> None:
    for span in spans(page.read_text()):
        words = span.removeprefix(".venv/bin/").split()
        if words[0] != "fp8fleet":
            continue
        parser: argparse.ArgumentParser | None = cli._parser()
        for word in words[1:]:
            commands = parser_commands(parser) if parser else {}
            if not commands:
                break
            assert word in commands, span
            parser = commands[word]


@every_page
def test_every_command_line_of_ours_parses(page: Path) -> None:
    for line in prose_and_code(page.read_text())[1].splitlines():
        if line.startswith("fp8fleet "):
            cli._parser().parse_args(shlex.split(line)[1:])


@every_page
def test_every_make_target_exists(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), flags=re.M)
    prose, code = prose_and_code(page.read_text())
    named = re.findall(r"`make ([a-z-]+)`", prose) + re.findall(r"^make ([a-z-]+)$", code, re.M)
    assert [name for name in named if name not in targets] == []


@every_page
def test_every_inventory_key_exists(page: Path) -> None:
    known = {*HostSpec.model_fields, *InstanceSpec.model_fields, *RepositorySpec.model_fields}
    known |= {*SamplingSpec.model_fields, *connector_data_meta, *NOT_KEYS}
    named = KEY.findall(prose_and_code(page.read_text())[0])
    assert [name for name in named if name not in known] == []


@every_page
def test_every_file_of_the_project_exists(page: Path) -> None:
    folders = "fp8fleet|roles|inventories|deploys|locks|models|lab|tests|templates|docs"
    for span in spans(page.read_text()):
        if not re.fullmatch(rf"(?:{folders})/[\w./*-]*", span) or "site" in span:
            continue
        if re.search(r"[A-Z]{3,}", span) or span.startswith("locks/vllm-0.33.0-ubuntu-24.04"):
            continue  # a place to fill in, or one that the page makes
        assert list(REPO.glob(span.rstrip("/"))), span


def code_texts() -> list[str]:
    """Every text of the code, with ``…`` for what an f-string fills in."""
    texts = []
    for folder in ("fp8fleet", "roles", "lab"):
        for path in (REPO / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def own_messages(page: Path) -> Iterator[str]:
    """The messages in the first columns, of the sections whose messages are ours."""
    for section in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
        if any(section.startswith(title) for title in FOREIGN):
            continue
        for row in re.findall(r"^\| ([^|]*`[^|]*) \|", section, flags=re.M):
            yield from (m for m in re.findall(r"`([^`]+)`", row) if not FOREIGN_MESSAGES.match(m))


@pytest.mark.parametrize("folder", [DOCS, DOCS / "zh"], ids=page_id)
def test_every_message_of_the_troubleshooting_page_is_one_of_the_codes(folder: Path) -> None:
    texts = code_texts()
    messages = list(own_messages(folder / "troubleshooting.md"))
    assert len(messages) > 30
    for message in messages:
        for fragment in re.split("…", message):
            said = fragment.strip(" :,()")
            assert not said or any(said in text for text in texts), message
