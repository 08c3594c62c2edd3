"""Takes a `vllm serve` command line apart: corrected options, and a finding for each wrong part."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from fp8fleet import catalog
from fp8fleet.catalog import OptionFacts, OptionTable
from fp8fleet.catalog_check import title
from fp8fleet.errors import OperatorError
from fp8fleet.findings import Finding, Severity
from fp8fleet.serve_options import Checkpoint, faults, full_names, unknown_option
from fp8fleet.spec import OWNED_OPTIONS, OWNED_VARIABLES

EXPECTED = "expected `vllm serve MODEL ...` or `python -m vllm.entrypoints.openai.api_server ...`"
_ROUNDS = 3
"""What stands in the place of a wrong option is judged again."""
_CONTAINERS = ("docker", "podman", "nerdctl")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)


@dataclass
class Translation:
    """What became of a command line."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values by the options' long names, for the inventory's ``options`` and vLLM's YAML."""
    findings: list[Finding] = field(default_factory=list)
    """One for each part that was put right (errors) or is doubtful (warnings)."""

    @property
    def corrected(self) -> bool:
        """Whether anything had to be put right."""
        return any(finding.severity == "error" for finding in self.findings)


def translate(text: str, release: str, checkpoint: Checkpoint | None = None) -> Translation:
    """Take a command line apart. No value that may be a secret gets into a finding.

    Args:
        text: the line or lines, as for a shell.
        release: a name of the catalogue.
        checkpoint: what is known of the model.

    Raises:
        OperatorError: it is not a command line of vLLM's server.
    """
    done = Translation()
    words = _arguments(_words(text), done)
    tables = catalog.option_tables_for(catalog.vllm_version(release))[0]
    reader = _Reader(release, tables[max(tables, key=_version)], done)
    reader.read(words)
    for _ in range(_ROUNDS):
        for fault in faults(release, done.options, checkpoint):
            if fault.finding not in done.findings:
                done.findings.append(fault.finding)
                if fault.instead is not None:
                    done.options = _put(done.options, fault.option, dict(fault.instead))
    return done


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _put(options: dict[str, Any], option: str, instead: dict[str, Any]) -> dict[str, Any]:
    """``options`` with one of them replaced where it stands."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= instead if name == option else {name: value}
    return found


def _note(
    done: Translation, code: str, message: str, remedy: str, severity: Severity = "error"
) -> None:
    done.findings.append(Finding(code, severity, None, None, message, remedy))


def _words(text: str) -> list[str]:
    """The shell's words; those of punctuation alone are its operators."""
    lexer = shlex.shlex(re.sub(r"\\\r?\n", " ", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        what = str(error).lower()
        raise OperatorError(f"the command line is not whole: {what}; {EXPECTED}") from None


def _arguments(words: list[str], done: Translation) -> list[str]:
    """What follows the command; variables in front of it and the shell's rest are noted."""
    words = _before_operators(words, done)
    while words and (words[0] in ("env", "exec", "nohup") or _VARIABLE.fullmatch(words[0])):
        word = words.pop(0)
        name = word.partition("=")[0]
        if "=" in word:
            place = OWNED_VARIABLES.get(name, "engine_environment")
            message = f"variable {name}: the inventory sets it from {place}"
            _note(done, "inventory", message, f"set {place}")
    command = [word.rsplit("/", 1)[-1] for word in words[:3]]
    if command[:2] == ["vllm", "serve"]:
        return words[2:]
    module = words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    if module and re.fullmatch(r"python[\d.]*", command[0]):
        return words[3:]
    if command[:1] and command[0] in _CONTAINERS:
        raise OperatorError(
            f"a command line of {command[0]}: give what the container runs, `vllm serve MODEL ...`"
            " (what follows the image, for vllm/vllm-openai with `vllm serve` in front)"
        )
    raise OperatorError(f"not a command line of vLLM's server: {EXPECTED}")


def _before_operators(words: list[str], done: Translation) -> list[str]:
    for position, word in enumerate(words):
        if word and set(word) <= set("();<>|&"):
            _note(
                done, "shell", f"{word!r} and what follows are the shell's, not vLLM's",
                "leave them out: a unit runs the server and the journal has its output",
            )  # fmt: skip
            stream = word.startswith((">", "<")) and words[position - 1].isdigit()
            return words[: position - stream]
    return words


class _Reader:
    """Reads the arguments as the release's parser would, into ``done``."""

    def __init__(self, release: str, table: OptionTable, done: Translation) -> None:
        self._release = release
        self._table = table
        self._done = done
        self._model = False

    def read(self, words: list[str]) -> None:
        rest = [*words]
        while rest:
            word = rest.pop(0)
            if not _is_option(word):
                self._positional(len(words) - len(rest))
            elif word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                head, dot, keys = name.partition(".")
                self._option(head.replace("_", "-") + dot + keys, value if equals else None, rest)
            else:
                self._short(word[1:], rest)

    def _positional(self, position: int) -> None:
        if self._model:
            message = f"word {position} after the command belongs to no option"
            _note(self._done, "stray-word", message, "quote values with spaces, or leave it out")
        self._model = True

    def _short(self, text: str, rest: list[str]) -> None:
        """``-tp 2``, ``-tp=2``, ``-O3``."""
        name, equals, value = text.partition("=")
        known = self._table.short_names
        if name in known:
            self._option(known[name], value if equals else None, rest)
        elif name.startswith("O") and "optimization-level" in self._table.names:
            self._option("optimization-level", value or name[1:] or None, rest)
        else:
            self._drop_value(rest)
            message = f"{title(self._release)} has no option of that name: -{_safe(name)}"
            _note(self._done, "unknown-option", message, "write the long name of the option")

    def _option(self, name: str, value: str | None, rest: list[str]) -> None:
        head, _, keys = name.partition(".")
        full = self._full(head)
        known = self._table.names.get(full)
        owner = OWNED_OPTIONS.get(known or full)
        if owner:
            self._words_of(full, value, rest)
            self._model |= full == "model"
            message = f"option {full!r}: the inventory sets it from {owner}"
            _note(self._done, "inventory", message, f"set {owner}")
            return
        words = self._words_of(full, value, rest)
        if keys:
            self._nested(full, keys, words)
            return
        self._store(full, self._value(full, words))

    def _full(self, name: str) -> str:
        """The name that is meant by one that is cut off or surely misspelt."""
        if name in self._table.names:
            return name
        longer = full_names(self._table, name)
        if len(longer) != 1:
            fault = unknown_option(self._release, name, None, self._table)
            if longer or not fault.instead:
                return name  # judged with the others
            self._done.findings.append(fault.finding)
            return next(iter(fault.instead))
        full = longer[0]
        message = f"option {_safe(name)!r}: is short for --{full}"
        _note(self._done, "abbreviated-option", message, f"write {full}")
        return full

    def _words_of(self, name: str, value: str | None, rest: list[str]) -> list[str]:
        """The words that belong to an option, taken off ``rest``."""
        facts = self._facts(name)
        if value is not None:
            return [value]
        if facts is None:
            return self._drop_value(rest)
        if facts.flag:
            if rest and rest[0].lower() in ("true", "false"):
                return [rest.pop(0)]
            return []
        many = facts.nargs in ("+", "*")
        words: list[str] = []
        while rest and not _is_option(rest[0]) and (many or not words):
            words.append(rest.pop(0))
        return words

    def _drop_value(self, rest: list[str]) -> list[str]:
        return [rest.pop(0)] if rest and not _is_option(rest[0]) else []

    def _facts(self, name: str) -> OptionFacts | None:
        """Of this release, or of another that has the option."""
        for table in (self._table, *reversed(catalog.option_tables().values())):
            if name in table.names:
                return table.options[table.names[name]]
        return None

    def _value(self, name: str, words: list[str]) -> Any:
        facts = self._facts(name)
        if facts is None:
            return words[0] if words else True
        if facts.flag:
            return self._flag(name, words)
        if facts.nargs in ("+", "*") and words:
            return [_typed(facts, word) for word in words]
        return _typed(facts, words[0]) if words else True  # YAML's bare option

    def _flag(self, name: str, words: list[str]) -> bool:
        """A flag takes no value on the command line, whatever people write."""
        if not words:
            return True
        message = f"option {name!r}: is a flag and takes no value"
        _note(self._done, "bad-value", message, f"write {name} alone, or true and false in YAML")
        return words[0].lower() not in ("false", "0", "no", "off")

    def _nested(self, name: str, keys: str, words: list[str]) -> None:
        """``--x.y.z v`` is a part of the map that --x takes, ``--x.y+ v`` an item of a list."""
        value: Any = _loose(words[0]) if words else True
        if keys.endswith("+") and words:
            keys, value = keys[:-1], words[0].split(",")
        for key in reversed(keys.split(".")):
            value = {key: value}
        before = self._done.options.get(name)
        self._done.options[name] = _merge(before, value) if isinstance(before, dict) else value

    def _store(self, name: str, value: Any) -> None:
        """The last one counts, as for argparse."""
        options = self._done.options
        own = self._table.names.get(name, name)
        for other in [text for text in options if self._table.names.get(text, text) == own]:
            message = f"option {_safe(name)!r}: is given twice"
            _note(self._done, "option-twice", message, "write it once; the last one counts")
            del options[other]
        options[name] = value


def _safe(name: str) -> str:
    """An option's name as it can be shown: what is no name may be a secret."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name) else "..."


def _is_option(word: str) -> bool:
    """Whether argparse takes a word for an option: a dash, and not a negative number."""
    return len(word) > 1 and word[0] == "-" and not re.fullmatch(r"-\d+|-\d*\.\d+", word)


def _typed(facts: OptionFacts, word: str) -> Any:
    """A word as YAML has it best: numbers and maps as such, if the option takes them."""
    if "integer" in facts.takes or facts.choices:
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                continue
    if word.lstrip().startswith("{"):
        found = _loose(word)
        return found if isinstance(found, dict) else word
    return word


def _loose(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            merged[key] = before + value
        else:
            merged[key] = value
    return merged
