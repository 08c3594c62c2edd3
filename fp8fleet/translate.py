"""Takes a `vllm serve` command line apart: corrected options, and a finding for each wrong part."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fp8fleet import catalog
from fp8fleet.catalog import OptionFacts, OptionTable
from fp8fleet.catalog_check import title
from fp8fleet.errors import OperatorError
from fp8fleet.findings import Finding, Severity
from fp8fleet.serve_options import (
    CACHE_TYPES,
    Checkpoint,
    faults,
    full_names,
    shown_option,
    unknown_option,
)
from fp8fleet.spec import OWNED_OPTIONS, OWNED_VARIABLES

EXPECTED = "expected `vllm serve MODEL ...` or `python -m vllm.entrypoints.openai.api_server ...`"
_ROUNDS = 3
"""What stands in the place of a wrong option is judged again."""
_CONTAINERS = ("docker", "podman", "nerdctl")
_SPACES = "\u00a0\u2002\u2003\u2009\u200b\u202f\u3000\ufeff"
"""What pages and chats have in the place of a space; no shell parts words at it."""
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"
_OPTION = re.compile(rf"([{_DASHES}]+)([{_DASHES}A-Za-z0-9_.+]*)(.?)(.*)", re.DOTALL)
"""An option's dashes, its name, the character that ends it, and the value."""
_QUOTES = "\u2018\u2019\u201c\u201d\u300c\u300d"
_QUOTED = re.compile(rf"(?<=[\s=])[{_QUOTES}]([^'\n]*?)[{_QUOTES}](?=\s|$)")
_STREAM = "\0"
"""Marks a number that touches a redirection: ``2>`` names a stream, ``2 >`` does not."""
_APPENDED = ("middleware",)
"""Options of which vLLM's parser collects every value (action="append" in its cli_args.py)."""
_DEEPEST = 20
"""Levels of a map that one dotted option may name; no config of vLLM's has more than a few."""
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
    words = _arguments(_words(_requoted(text, done), done), done)
    tables = catalog.option_tables_for(catalog.vllm_version(release))[0]
    reader = _Reader(release, tables[max(tables, key=_version)], done)
    reader.read(words)
    for _ in range(_ROUNDS):
        for fault in faults(release, done.options, checkpoint):
            if fault.finding not in done.findings:
                done.findings.append(fault.finding)
                if fault.instead is not None:
                    done.options = _put(done.options, fault.option, dict(fault.instead))
    if checkpoint is None:
        _note_unjudged(done)
    return done


def _note_unjudged(done: Translation) -> None:
    """The options that stay without having met the checkpoint that they are for."""
    options = done.options
    unjudged = ["quantization"] if isinstance(options.get("quantization"), str) else []
    if options.get("kv-cache-dtype") in CACHE_TYPES:
        unjudged.append("kv-cache-dtype")
    for option in unjudged:
        message = f"option {option!r}: not judged against a checkpoint"
        _note(done, "not-judged", message, "name it with --model", severity="warning")


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


def _wrong_character(done: Translation, where: str, wrong: str, right: str, remedy: str) -> None:
    """Note a character that looks like the one that the shell or vLLM knows."""
    name = unicodedata.name(wrong, "no name")
    message = f"{where}{wrong!r} (U+{ord(wrong):04X}, {name}) is not {right}"
    _note(done, "wrong-character", message, remedy)


def _requoted(text: str, done: Translation) -> str:
    """``text`` with the quotes of Chinese text around a word made the shell's."""

    def straight(match: re.Match[str]) -> str:
        before = text[: match.start()]
        if before.count("'") % 2 or before.count('"') % 2:
            return match[0]  # inside quotes they are text
        _wrong_character(done, "", match[0][0], "a quote of the shell", "write ' or \"")
        return "'" + re.sub("[\u201c\u201d]", '"', match[1]) + "'"

    return _QUOTED.sub(straight, text)


def _words(text: str, done: Translation) -> list[str]:
    """The shell's words; those of punctuation alone are its operators."""
    text = re.sub(r"\\\r?\n", " ", text.replace(_STREAM, ""))
    text = re.sub(r"(?<=\s)(?=\d+[<>])", _STREAM, text)
    words = _split(text, _SPACES)
    if words != _split(text, ""):
        wrong = next(character for character in text if character in _SPACES)
        _wrong_character(done, "", wrong, "a space", "write spaces between words")
    return words


def _split(text: str, spaces: str) -> list[str]:
    """The words of a shell for which ``spaces`` part words, too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace += spaces
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        what = str(error).lower()
        raise OperatorError(f"the command line is not whole: {what}; {EXPECTED}") from None


def _arguments(words: list[str], done: Translation) -> list[str]:
    """What follows the command; variables in front of it and the shell's rest are noted."""
    started = any(w.rsplit("/", 1)[-1] == "vllm" and n == "serve" for w, n in pairwise(words))
    words = [word.removeprefix(_STREAM) for word in _before_operators(words, done)]
    while words and (words[0] in ("env", "exec", "nohup") or _VARIABLE.fullmatch(words[0])):
        word = words.pop(0)
        name = word.partition("=")[0]
        if "=" in word:
            if place := OWNED_VARIABLES.get(name):
                message = f"variable {name}: the inventory sets it from {place}"
                _note(done, "inventory", message, f"set {place}")
            else:
                message = f"variable {name}: is no option, and variables are not judged"
                remedy = "write it in engine_environment if it is still needed"
                _note(done, "inventory", message, remedy)
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
    if started:
        raise OperatorError(
            "something stands before `vllm serve`: give only the line of `vllm serve MODEL ...`,"
            " with variables as NAME=VALUE in front of it"
        )
    raise OperatorError(f"not a command line of vLLM's server: {EXPECTED}")


def _before_operators(words: list[str], done: Translation) -> list[str]:
    for position, word in enumerate(words):
        if word and set(word) <= set("();<>|&"):
            _note(
                done, "shell", f"{word!r} and what follows are the shell's, not vLLM's",
                "leave them out: a unit runs the server and the journal has its output",
            )  # fmt: skip
            stream = position > 0 and words[position - 1].startswith(_STREAM)
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
        words = [self._plain_option(word) for word in words]
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

    def _plain_option(self, word: str) -> str:
        """An option with vLLM's own dashes and ``=``, where it has others that look like them."""
        match = _OPTION.fullmatch(word)
        if match is None or not match[2]:
            return word
        dashes, name, sign, value = match.groups()
        dash = next((character for character in dashes + name if character in _DASHES[1:]), "")
        plain = re.sub(f"[{_DASHES[1:]}]", "-", name)
        short = plain.partition(".")[0] in self._table.short_names
        number = re.fullmatch(r"\d+(\.\d+)?", plain)
        long = len(dashes) > 1 or (dash and not short and not number)
        start = "--" if long else "-"
        other = sign if sign != "=" and (long or not sign.isascii()) else ""  # -O{...} is right
        where = f"option {shown_option(plain)!r}: "
        remedy = f"write {start}{shown_option(plain)}"
        if dash:
            _wrong_character(self._done, where, dash, "'-'", remedy)
        if other:
            _wrong_character(self._done, where, other, "'='", f"{remedy}=VALUE")
            sign = "="
        return f"{start}{plain}{sign}{value}"

    def _positional(self, position: int) -> None:
        if self._model:
            message = f"word {position} after the command belongs to no option"
            _note(self._done, "stray-word", message, "quote values with spaces, or leave it out")
        self._model = True

    def _short(self, text: str, rest: list[str]) -> None:
        """``-tp 2``, ``-tp=2``, ``-cc.mode=3``, ``-O3``; ``-O.mode=3`` is ``-cc.mode=3``."""
        name, equals, value = text.partition("=")
        head, dot, keys = name.partition(".")
        known = {"O": "compilation-config"} if dot else {}
        known |= self._table.short_names
        if head in known:
            self._option(known[head] + dot + keys, value if equals else None, rest)
        elif name.startswith("O") and "optimization-level" in self._table.names:
            self._option("optimization-level", value or name[1:] or None, rest)
        else:
            self._drop_value(rest)
            shown = name if shown_option(name) == name else "..."
            message = f"{title(self._release)} has no option of that name: -{shown}"
            _note(self._done, "unknown-option", message, "write the long name of the option")

    def _option(self, name: str, value: str | None, rest: list[str]) -> None:
        head, _, keys = name.partition(".")
        full = self._full(head)
        known = self._table.names.get(full)
        owner = OWNED_OPTIONS.get(known or full)
        if owner:
            self._words_of(full, value, rest)
            if full == "model":  # as where it stands by its place: every line names one
                self._model = True
                return
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
        message = f"option {shown_option(name)!r}: is short for --{full}"
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
        """The words after an option that is not known; one, where the model may come next."""
        words: list[str] = []
        while rest and not _is_option(rest[0]) and (self._model or not words):
            words.append(rest.pop(0))
        return words

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
        if keys.count(".") >= _DEEPEST:
            message = f"option {name!r}: no map has {keys.count('.') + 1} levels"
            _note(self._done, "bad-value", message, "write the map as JSON")
            return
        value: Any = _loose(words[0]) if words else True
        if keys.endswith("+") and words:
            keys, value = keys[:-1], words[0].split(",")
        for key in reversed(keys.split(".")):
            value = {key: value}
        before = self._done.options.get(name)
        if isinstance(before, dict):
            value = _merge(before, value)
        elif before is not None:
            message = f"option {name!r}: is given whole and in parts"
            _note(self._done, "option-twice", message, f"write {name} once, as JSON")
        self._done.options[name] = value

    def _store(self, name: str, value: Any) -> None:
        """The last one counts, as for argparse."""
        options = self._done.options
        own = self._table.names.get(name, name)
        for other in [text for text in options if self._table.names.get(text, text) == own]:
            message = f"option {shown_option(name)!r}: is given twice"
            remedy = "write it once; the last one counts"
            if own in _APPENDED:
                message += ", and vLLM uses all of them; options of a file hold one"
                remedy = "write one that applies the others, too"
            _note(self._done, "option-twice", message, remedy)
            del options[other]
        options[name] = value


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
