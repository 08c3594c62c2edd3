"""Writes docs/inventory.md and its Chinese twin from the models that read inventories."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fp8fleet import catalog, spec
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.inventory import SWITCHES
from fp8fleet.lengths import Count
from fp8fleet.secrets import SecretRef
from fp8fleet.spec import DriverSpec, HostSpec, InstanceSpec, SamplingSpec
from fp8fleet.toml import read_toml

ROOT = Path(__file__).resolve().parent.parent
ENGLISH_PAGE = Path("docs/inventory.md")
CHINESE_PAGE = Path("docs/zh/inventory.md")
CHINESE_TEXTS = Path("docs/zh/inventory_keys.toml")
"""The Chinese texts: a table for each list of keys, and one for the phrases of this module."""

SECTIONS = {
    "platform": "Host",
    "drivers": "Drivers",
    "firewall": "Firewall",
    "apt_sources": "Package sources",
    "tools_requirements": "Engine",
    "model_manifest": "Model",
    "workload": "Workload and sampling",
    "instances": "Servers",
    "nginx_listen": "Nginx",
}
"""The first key of each section; the keys stand in the order of ``HostSpec``."""

INTRO = """An inventory is a Python file: each module-level list is a group of hosts. Values stand
beside a host, in `group_data/<group>.py` or in `group_data/all.py`, each as a plain variable
`key = value`. The stronger place wins: `--data key=value` on the command line, then the host, then
its groups (the last one first; the inventory file's own name is a group and the last of all), then
`all`. Keys are flat: a list or a table is replaced whole, never merged.

A key that is not on this page is refused before anything connects, and so is a wrong value.
One of `conda_frontend_url` and `conda_frontend_path` is needed on every host."""

SWITCH_TEXTS = {
    "verify": "`stamp`: a model file that looks as it did when it was hashed is not hashed again."
    " `full`: every model file is hashed.",
    "preflight": "`fast`: hosts are judged by what is read in seconds. `full`: also by the kernel's"
    " GPU errors and by memory rows that wait for repair.",
    "ignore": "Codes of preflight's findings (docs/preflight.md), separated by commas, that stop"
    " nothing in this run; the report says so.",
}

PYINFRA_TEXTS = {
    "ssh_hostname": "Address or name that SSH connects to. Unset: the host's name in the"
    " inventory.",
    "ssh_port": "SSH port, a number. Unset: 22.",
    "ssh_user": "Login name.",
    "ssh_key": "Private key file. Unset: the SSH agent and the user's own keys.",
    "ssh_config_file": "An ssh_config file; bastions go here (`ProxyJump`). Unset:"
    " `~/.ssh/config`.",
    "ssh_known_hosts_file": "A known_hosts file. Unset: `~/.ssh/known_hosts`.",
    "ssh_strict_host_key_checking": "`yes`: only hosts with a known key."
    " `inventories/group_data/all.py` sets it.",
    "ssh_connect_retries": "How often a failed connection is tried again, a number. Unset: 0.",
    "_sudo": "`True`: every command runs with sudo. Not needed where `ssh_user` is root.",
    "_env": "Environment of every command; `inventories/group_data/all.py` sets the locale.",
}
"""The keys of pyinfra that fleets need. It has more, which are passed on to it."""

_PYINFRA_LEAD = (
    "Keys that begin with `ssh_` or `_` are pyinfra's own; an `ssh_` key that it lacks is refused."
    " Those fleets need:"
)

_ALIASES: tuple[tuple[object, str], ...] = (
    (spec.Sha256, "SHA256, 64 hex digits"),
    (spec.AbsolutePath, "absolute path"),
    (spec.OwnDirectory, "absolute path of a directory of its own"),
    (spec.ProjectFile, "file of the project"),
    (spec.Url, "URL (`http`, `https`, `file`)"),
    (spec.WebUrl, "URL (`http`, `https`)"),
    (spec.Source, "URL (`http`, `https`, `file`) without login, `?` and `#`"),
    (spec.PythonVersion, 'version in quotes, such as `"3.12"`'),
    (spec.CmakeVersion, 'version in quotes, such as `"3.28"`'),
    (spec.CmakeArchive, "URL of `cmake-VERSION-linux-ARCH.tar.gz`"),
    (spec.ModelId, "model id: letters, digits, `. _ @ + - /`"),
    (spec.Address, "IP address"),
    (spec.Port, "port, 1-65535"),
    (spec.Name, "name: `a-z 0-9 . -`"),
    (spec.LinuxUser, "user name, not root"),
    (spec.Seconds, "seconds, 1 to 604800"),
    (spec.AptSource, "line that begins with `deb `"),
    (spec.Channel, "channel, a name or URL"),
    (spec.OneLine, "line of text"),
    (spec.RepositorySpec, "table with `name`, `base_url`, and `gpg_key` or `gpgcheck: False`"),
    (spec.PackagePattern, "package name, `*` for any letters"),
    (spec.TimeServer, "name or address"),
    (spec.CombinationSpec, "table with `driver`, `engine`, perhaps `cuda`"),
    (SecretRef, "`env:NAME` or `file:/path`"),
    (InstanceSpec, "server (keys below)"),
    (DriverSpec, "driver (keys below)"),
    (spec.Network, "network or IP address"),
    (spec.DriverVersion, 'version in quotes, such as `"580.95.05"`'),
    (spec.PackageName, "package name"),
    (spec.TokensSpec, "table with `p50`, `p95`, `max`"),
    (SamplingSpec, "table (keys below)"),
    (Count, "integer, at least 1"),
    (spec.DeviceCount, "number of devices, 1 to 16"),
    (spec.DevicePair, "pair of devices"),
)
"""Types by identity, in an operator's words."""

_TYPES = {
    "platform": "platform of the catalogue",
    "driver.name": "driver of the catalogue",
    "driver.source": "`packages` or URL (`http`, `https`, `file`)",
    "accelerator": "accelerator of the catalogue",
    "engine_release": "release of the catalogue",
    "sysctl": "table: parameter to value",
    "engine_environment": "table: variable to value",
    "options": "table: option to value",
    "instance.group": "group of the inventory",
    "model_rate_limit": "megabytes a second, at least 0.1",
    "engine_pins": "list of `NAME==VERSION`",
    "nginx_server_name": "names, separated by spaces",
    "nginx_body_size": "size, such as `64m`",
    "log_max_size": "size, such as `500m` or `4g`",
    "package_versions": "table: package to version",
    "workload": "workload of the catalogue",
    "workload_latency_goal_ms": "milliseconds",
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), "number"),
}
"""Keys whose Python type says less than the operator has to know."""


class _English:
    """The texts as they stand in the code."""

    def about(self, table: str, key: str, english: str) -> str:
        """What ``key``, of the list ``table``, means.

        Raises:
            CheckFailed: nothing says it.
        """
        if not english:
            raise CheckFailed(f"{table}: {key} has no description: write one")
        return english

    def say(self, phrase: str) -> str:
        """A phrase of this module."""
        return phrase


class _Chinese(_English):
    """The texts of docs/zh/inventory_keys.toml."""

    def __init__(self, path: Path) -> None:
        self._tables: dict[str, Any] = read_toml(path)
        self._used: set[tuple[str, str]] = set()

    def about(self, table: str, key: str, english: str) -> str:
        """See `_English.about`."""
        super().about(table, key, english)
        text = self._tables.get(table, {}).get(key)
        if not text:
            raise CheckFailed(f"{CHINESE_TEXTS}: [{table}] lacks {key!r}: add its Chinese text")
        self._used.add((table, key))
        return str(text)

    def say(self, phrase: str) -> str:
        """See `_English.say`."""
        return self.about("phrases", phrase, phrase)

    def refuse_unused(self) -> None:
        """Refuse texts that no page has.

        Raises:
            CheckFailed: naming the first of them.
        """
        for table, texts in self._tables.items():
            for key in texts:
                if (table, key) not in self._used:
                    raise CheckFailed(f"{CHINESE_TEXTS}: [{table}] {key!r}: no such key: remove it")


def render_pages(root: Path = ROOT) -> dict[Path, str]:
    """Both pages, by their paths relative to ``root``, which has the Chinese texts.

    Raises:
        CheckFailed: a key without a text, or a Chinese text without a key.
    """
    chinese = _Chinese(root / CHINESE_TEXTS)
    pages = {ENGLISH_PAGE: _page(_English()), CHINESE_PAGE: _page(chinese)}
    chinese.refuse_unused()
    return pages


def outdated(root: Path = ROOT) -> list[Path]:
    """The pages under ``root`` that differ from what would be generated, relative to it.

    Raises:
        CheckFailed: see `render_pages`.
    """
    return [
        path
        for path, text in render_pages(root).items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def _page(language: _English) -> str:
    parts = [
        f"# {language.say('Inventory keys')}",
        f"<!-- {language.say('Generated by `make docs`: change fp8fleet/spec.py instead.')} -->",
        language.about("page", "intro", INTRO),
        *_host_parts(language),
        f"## {language.say('Keys of one server')} (`instances`)",
        _key_table(language, InstanceSpec, InstanceSpec.model_fields, "instance"),
        f"## {language.say('Keys of one driver')} (`drivers`)",
        _key_table(language, DriverSpec, DriverSpec.model_fields, "driver"),
        f"## {language.say('Sampling parameters')} (`sampling`)",
        _key_table(language, SamplingSpec, SamplingSpec.model_fields, "sampling"),
        f"## {language.say('Switches of one run')} (`--data`)",
        _switch_table(language),
        f"## {language.say('Keys of pyinfra')}",
        language.say(_PYINFRA_LEAD),
        _text_table(language, PYINFRA_TEXTS, "pyinfra"),
        *_catalogue_parts(language),
    ]
    return "\n\n".join(parts) + "\n"


def _host_parts(language: _English) -> list[str]:
    """A heading and a table for each section of ``HostSpec``."""
    sections: list[list[str]] = []
    for key in HostSpec.model_fields:
        if key in SECTIONS:
            sections.append([])
        sections[-1].append(key)
    parts = []
    for keys in sections:
        parts.append(f"## {language.say(SECTIONS[keys[0]])}")
        parts.append(_key_table(language, HostSpec, keys, "host"))
    return parts


def _key_table(language: _English, model: type[BaseModel], keys: Iterable[str], table: str) -> str:
    hints = get_type_hints(model, include_extras=True)
    needed = HostSpec.model_construct().required_to_serve() if model is HostSpec else []
    rows = []
    for key in keys:
        field = model.model_fields[key]
        default = _default(language, field)
        if key in needed:
            text = "a serving host needs it" + ", or a workload" * (key == "instances")
            default += language.say("; ") + language.say(text)
        text = language.about(table, key, field.description or "")
        rows.append((f"`{key}`", _type(language, table, key, hints[key]), default, text))
    return _table(language, ("Key", "Type", "Default", "Meaning"), rows)


def _type(language: _English, table: str, key: str, hint: Any) -> str:
    """The type of ``key`` in an operator's words.

    Raises:
        CheckFailed: this module has no words for it.
    """
    known = _TYPES.get(f"{table}.{key}") or _TYPES.get(key)
    words = language.say(known) if known else _describe(language, hint)
    if not words:
        raise CheckFailed(f"{key}: no words for its type: add them to fp8fleet/inventory_docs.py")
    return words


def _describe(language: _English, hint: Any) -> str:
    """A type in an operator's words; empty where there are none."""
    for alias, words in _ALIASES:
        if hint is alias:
            return language.say(words)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _describe(language, next(a for a in arguments if a is not NoneType))
    if hint is bool:
        return "`True` / `False`"
    if origin is Literal:
        return " / ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return language.say("list: {}").format(_describe(language, arguments[0]))
    if origin is Annotated and arguments[0] is int and isinstance(arguments[1], FieldInfo):
        bounds = arguments[1].metadata
        least = next(bound.ge for bound in bounds if isinstance(bound, Ge))
        if most := [bound.le for bound in bounds if isinstance(bound, Le)]:
            return language.say("integer, {} to {}").format(least, most[0])
        return language.say("integer, at least {}").format(least)
    return ""


def _default(language: _English, field: FieldInfo) -> str:
    if field.is_required():
        return language.say("required")
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, bool):
        return f"`{value}`"
    return language.say("unset") if value is None else f"`{json.dumps(value)}`"


def _switch_table(language: _English) -> str:
    rows = []
    for key, values in SWITCHES.items():
        shown = ", ".join(f"`{value}`" for value in values if value)
        if values[0]:
            shown = shown.replace("`,", f"` ({language.say('default')}),", 1)
        else:
            shown = language.say("codes")
        text = language.about("switches", key, SWITCH_TEXTS.get(key, ""))
        rows.append((f"`{key}`", shown, text))
    return _table(language, ("Switch", "Values", "Meaning"), rows)


def _text_table(language: _English, texts: Mapping[str, str], table: str) -> str:
    rows = [(f"`{key}`", language.about(table, key, text)) for key, text in texts.items()]
    return _table(language, ("Key", "Meaning"), rows)


def _catalogue_parts(language: _English) -> list[str]:
    """The names that `platform`, `accelerator` and `engine_release` can have."""
    platforms = [(f"`{n}`", p.family, p.glibc) for n, p in catalog.platforms().items()]
    accelerators = [
        (f"`{n}`", a.vendor, a.compute_capability or "-", language.say(a.fp8_block))
        for n, a in catalog.accelerators().items()
    ]
    releases = [
        (
            *(f"`{n}`", r.python, r.pydantic, r.cuda or "-", r.glibc),
            language.say("yes" if r.shutdown_timeout else "no"),
        )
        for n, r in catalog.releases().items()
    ]
    drivers = [
        (
            *(f"`{n}`", d.vendor, ", ".join(d.packages) or "-"),
            language.say("yes" if d.runs else "no"),
        )
        for n, d in catalog.installers().items()
    ]
    workloads = [
        (
            *(f"`{n}`", _quantiles(w.prompt), _quantiles(w.output), str(w.concurrency)),
            f"{w.latency_goal_ms:g} ms" if w.latency_goal_ms else "-",
        )
        for n, w in catalog.workloads().items()
    ]
    workload_head = ("Name", "Prompt tokens", "Output tokens", "Streams", "Latency goal")
    release_head = (
        *("Name", "Python", "pydantic", "CUDA of the wheel", "glibc of the wheel"),
        "Drains on stop",
    )
    return [
        f"## {language.say('Names in the catalogue')}",
        language.say("They stand in `fp8fleet/catalog/`, each with its source."),
        "### `platform`",
        _table(language, ("Name", "Packages by", "glibc"), platforms),
        "### `accelerator`",
        _table(language, ("Name", "Vendor", "Compute capability", "Block FP8"), accelerators),
        "### `engine_release`",
        _table(language, release_head, releases),
        "### `workload`",
        _table(language, workload_head, workloads),
        f"### {language.say('`name` of a driver')}",
        _table(language, ("Name", "Vendor", "From packages", "From an installer"), drivers),
    ]


def _quantiles(lengths: catalog.Quantiles) -> str:
    return f"p50 {lengths.p50}, p95 {lengths.p95}, max {lengths.max}"


def _table(language: _English, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``head`` is in English."""
    lines = [[language.say(cell) for cell in head], ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def _check() -> int:
    if pages := outdated():
        names = " and ".join(map(str, pages))
        raise CheckFailed(f"{names}: not what would be generated: run `make docs`")
    return 0


def _write() -> int:
    for path, text in render_pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fp8fleet.inventory_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    action: Callable[[], int] = _check if parser.parse_args(argv).check else _write
    try:
        return action()
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
