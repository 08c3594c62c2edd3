"""Judges options of `vllm serve` against a release's own parser, its config and the checkpoint.

Pure: the catalogue's tables and the arguments are all that counts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp8fleet import catalog
from fp8fleet.catalog import OptionFacts, OptionTable
from fp8fleet.catalog_check import title
from fp8fleet.findings import Finding, Severity
from fp8fleet.jsonfile import shown
from fp8fleet.manifest import Manifest
from fp8fleet.quantization import COMPRESSED_TENSORS, NONE, UNKNOWN, quantization_name

EAGER = (
    "without CUDA graphs a block-FP8 8B model made 2,142 instead of 10,860 output tokens/s at 64"
    " streams on an H200 (vLLM 0.23.0)"
)
MAP_REMEDY = "write a YAML map, or JSON with its quotes (a shell takes them unless ' is around it)"
OMIT_QUANTIZATION = "leave it out: it is read from the checkpoint's config.json"
CACHE_TYPES = ("float16", "bfloat16")
"""Types of a KV cache that are a model's own."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_SECRET_NAME = re.compile(r"[\w.-]{0,60}?(api[-_.]?key|hf[-_.]?token)", re.ASCII | re.IGNORECASE)
_SIMILAR = 0.6
"""Of difflib's ratio: below it a name is not taken for a misspelt one."""
_SURE = 0.9


@dataclass(frozen=True)
class Checkpoint:
    """What is known of the model that the options are for; None: not known, and not judged."""

    quantization: str | None = None
    """As the manifest names it (see `fp8fleet.quantization`)."""
    dtype: str | None = None
    """As its config.json names the type of what is not quantized, such as ``bfloat16``."""


def checkpoint_of(manifest: Manifest, config: Mapping[str, Any] | None) -> Checkpoint:
    """What a manifest and the config.json beside it say of a checkpoint.

    Args:
        config: of `fp8fleet.stored.read_config`.
    """
    if config is None:
        return Checkpoint(manifest.quantization)
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Checkpoint(
        manifest.quantization or quantization_name(config),
        dtype if isinstance(dtype, str) else None,
    )


@dataclass(frozen=True)
class Fault:
    """A finding with the option it is about, and what puts it right."""

    option: str
    finding: Finding
    instead: Mapping[str, Any] | None = None
    """Options to write in its place, empty: none. None: it can stay."""


def judge(
    release: str,
    options: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    transformers: int | None = None,
    accelerator: str | None = None,
) -> tuple[Finding, ...]:
    """All that speaks against ``options``, errors first; see `faults`."""
    found = faults(release, options, checkpoint, transformers, accelerator)
    return tuple(fault.finding for fault in found)


def faults(
    release: str,
    options: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    transformers: int | None = None,
    accelerator: str | None = None,
) -> tuple[Fault, ...]:
    """All that speaks against the options of a server.

    A release without a table of its own is judged by the nearest older and newer ones, where both
    say the same. One older or newer than all tables is judged by what is known of single options
    only, and a warning says so.

    Args:
        release: a name of the catalogue.
        options: values by the options' long names without leading dashes, as in vLLM's YAML.
        checkpoint: what they are to serve.
        transformers: first number of the installed transformers release; None: as the table.
        accelerator: a name of the catalogue.

    Returns:
        Errors first, each group in the order of the options.
    """
    tables, own = catalog.option_tables_for(catalog.vllm_version(release))
    judged = [
        tuple(_Judge(release, table, transformers).faults(options, checkpoint or Checkpoint()))
        for table in tables.values()
    ]
    if own:
        found = list(judged[0])
    elif len(judged) == 2:
        agreed = {(fault.option, fault.finding.code) for fault in judged[0]}
        found = [
            _by_neighbours(fault, release, tuple(tables))
            for fault in judged[1]
            if (fault.option, fault.finding.code) in agreed
        ]
    else:
        found = list(_past(release, options))
    if accelerator != "cpu" and options.get("enforce-eager") is True:
        found.append(_slow("enforce-eager"))
    return tuple(sorted(found, key=lambda fault: fault.finding.severity != "error"))


def _by_neighbours(fault: Fault, release: str, names: tuple[str, ...]) -> Fault:
    old = fault.finding
    message = f"{old.message} (as {' and '.join(names)} have it: {title(release)} has no table)"
    finding = Finding(old.code, old.severity, None, None, message, old.remedy)
    return Fault(fault.option, finding, fault.instead)


def _past(release: str, options: Mapping[str, Any]) -> Iterator[Fault]:
    """What is known of a release that no table is near to."""
    tables = catalog.option_tables().values()
    for option, value in options.items():
        known = catalog.serve_options().get(option)
        if known and not known.is_accepted(catalog.vllm_version(release)):
            yield unknown_option(release, option, value, None)
        elif known and isinstance(value, str) and value in known.values:
            message = f"no release takes {shown(value)}"
            yield _fault(option, "bad-value", message, known.values[value])
        elif known and known.map and not _is_map(value):
            yield _no_map(release, option, value)
        elif known is None and not any(option in table.names for table in tables):
            message = "is in no release that has a table"
            remedy = f"look whether {title(release)} has it"
            yield _fault(option, "not-judged", message, remedy, severity="warning")
    if options:
        message = f"{title(release)} has no table of options: most of them were not judged"
        remedy = "start one server first"
        yield Fault("", Finding("not-judged", "warning", None, None, message, remedy))


def _fault(
    option: str,
    code: str,
    message: str,
    remedy: str,
    instead: Mapping[str, Any] | None = None,
    severity: Severity = "error",
) -> Fault:
    text = f"option {shown_option(option)!r}: {message}"
    finding = Finding(code, severity, None, None, text, remedy)
    put = {} if instead is None and severity == "error" else instead
    return Fault(option, finding, put)


def shown_option(name: str) -> str:
    """An option's name as it can be shown: what follows a name may be a secret, and is cut off."""
    shown_part = _SECRET_NAME.match(name) or _NAME.match(name)
    kept = shown_part[0] if shown_part else ""
    return kept if kept == name else f"{kept}..."


def _slow(option: str) -> Fault:
    remedy = "leave it out unless a kernel fails with graphs"
    return _fault(option, "eager", EAGER, remedy, severity="warning")


def unknown_option(release: str, option: str, value: Any, table: OptionTable | None) -> Fault:
    """An option that the release lacks: what to write, or the closest spelling.

    Returns:
        A fault whose ``instead`` has the option that is surely meant, with ``value``.
    """
    message = f"{title(release)} has no --{shown_option(option)}"
    known = catalog.serve_options().get(option)
    if known and known.remedy:
        return _fault(option, "unknown-option", message, known.remedy)
    having = [name for name, other in catalog.option_tables().items() if option in other.names]
    if having:
        message += f" (vLLM {', '.join(having)} has it)"
    names = list(table.names) if table and not having else []
    for close in difflib.get_close_matches(option, names, 1, _SIMILAR):
        surely = difflib.SequenceMatcher(None, option, close).ratio() >= _SURE
        instead = {close: value} if surely else None
        return _fault(option, "unknown-option", message, f"did you mean {close}?", instead)
    return _fault(option, "unknown-option", message, "leave it out, or choose another release")


class _Judge:
    """Judges by one table."""

    def __init__(self, release: str, table: OptionTable, transformers: int | None) -> None:
        self._release = release
        self._title = title(release)
        self._table = table
        self._transformers = transformers or table.transformers
        # a plugin's package brings methods and cache types of its own
        self._plain = catalog.releases()[release].distribution == "vllm"

    def faults(self, options: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[Fault]:
        written: dict[str, str] = {}
        for option, value in options.items():
            name = self._table.names.get(option)
            if name is None:
                yield self._unknown(option, value)
            elif name in written:
                message = f"says again what {written[name]!r} says"
                yield _fault(option, "option-twice", message, "write one of them")
            else:
                written[name] = option
                facts = self._table.options[name]
                fault = self._value(option, name, facts, value)
                if fault:
                    yield fault
                else:
                    yield from self._meaning(option, name, facts, options, checkpoint)

    def _unknown(self, option: str, value: Any) -> Fault:
        longer = full_names(self._table, option)
        if len(longer) == 1:
            return _fault(
                option, "abbreviated-option", f"is short for --{longer[0]}, as long as no other"
                " option starts so", f"write {longer[0]}", {longer[0]: value},
            )  # fmt: skip
        return unknown_option(self._release, option, value, self._table)

    # What the parser says of a value that came out of YAML (FlexibleArgumentParser's
    # load_config_file: true is the bare option, lists are several words, maps JSON, all else str).

    def _value(self, option: str, name: str, facts: OptionFacts, value: Any) -> Fault | None:
        if value is False:
            return self._false(option, name, facts)
        if facts.flag:
            if value is True:
                return None
            return self._bad(option, value, "true or false")
        if isinstance(value, list | tuple):
            return self._list(option, facts, value)
        if value is True:
            return None if facts.nargs in ("?", "*") else self._no_value(option, facts)
        known = catalog.serve_options().get(name)
        if known and known.map and not _is_map(value):
            return _no_map(self._release, option, value)
        unknown = [key for key in _map(value) if facts.keys and key not in facts.keys]
        if unknown:
            return _fault(
                option, "bad-value", f"{self._title} has no {_shown(unknown[0])} in it",
                f"leave that out; it has {_some(facts.keys)}",
            )  # fmt: skip
        text = "{}" if isinstance(value, dict) else _text(value)
        return None if fits(facts, text) else self._bad(option, value, _expected(facts))

    def _list(self, option: str, facts: OptionFacts, values: Any) -> Fault | None:
        if not values:
            message = "an empty list is silently ignored"
            return _fault(option, "ignored-value", message, "leave it out")
        if facts.nargs not in ("+", "*") and not isinstance(facts.nargs, int):
            if "array" in facts.takes and (text := _json(list(values))) is not None:
                return _fault(
                    option, "bad-value", "takes one value: of a YAML list vLLM makes several",
                    f"write the list as JSON in quotes: '{text}'", {option: text},
                )  # fmt: skip
            return self._bad(option, values, _expected(facts))
        wrong = [item for item in values if not fits(facts, _text(item))]
        return self._bad(option, wrong[0], f"each to be {_expected(facts)}") if wrong else None

    def _false(self, option: str, name: str, facts: OptionFacts) -> Fault | None:
        """``x: false``, which older releases do not read."""
        denial = next((text for text in facts.denials if text == f"no-{option}"), None)
        if not facts.flag:
            return self._bad(option, False, _expected(facts))
        if self._table.false == "denied" and denial:
            return None
        if option == name and facts.default is False:
            return None  # it is so anyhow
        message = f"{self._title} silently ignores false here"
        if denial:
            return _fault(option, "ignored-value", message, f"write {denial}: true", {denial: True})
        return _fault(option, "ignored-value", message, "leave it out")

    def _no_value(self, option: str, facts: OptionFacts) -> Fault:
        message = f"needs a value, expected {_expected(facts)}"
        return _fault(option, "bad-value", message, "write one or leave it out")

    def _bad(self, option: str, value: Any, expected: str) -> Fault:
        known = catalog.serve_options().get(option)
        remedy = known.values.get(value) if known and isinstance(value, str) else None
        if isinstance(value, str) and value.lstrip().startswith("{") and "(JSON)" in expected:
            remedy = MAP_REMEDY
        message = f"{self._title} does not take {_shown(value)}, expected {expected}"
        return _fault(option, "bad-value", message, remedy or "write such a value or leave it out")

    # What the config says of it later, and what it means for the checkpoint.

    def _meaning(
        self,
        option: str,
        name: str,
        facts: OptionFacts,
        options: Mapping[str, Any],
        checkpoint: Checkpoint,
    ) -> Iterator[Fault]:
        value = options[option]
        if facts.deprecated:
            message = f"is deprecated in {self._title}"
            yield _fault(option, "deprecated", message, "plan without it", severity="warning")
        if facts.later and self._plain and value is not None and _text(value) not in facts.later:
            yield self._bad(option, value, f"one of {_some(facts.later)}")
        elif name == "quantization" and isinstance(value, str):
            yield from self._quantization(option, facts, value, options, checkpoint)
        elif name == "kv-cache-dtype" and value in CACHE_TYPES:
            yield from self._cache_type(option, value, options, checkpoint)
        elif name == "hf-overrides" and self._transformers >= 5 and "rope_theta" in _map(value):
            yield _fault(
                option, "ignored-value", "transformers 5 silently ignores rope_theta",
                "leave it out, the checkpoint has the right value; to change it all the same:"
                ' rope_parameters = {"rope_theta": ...}', _without_theta(option, value),
            )  # fmt: skip

    def _quantization(
        self,
        option: str,
        facts: OptionFacts,
        value: str,
        options: Mapping[str, Any],
        checkpoint: Checkpoint,
    ) -> Iterator[Fault]:
        if value in facts.deprecated_values and not options.get("allow-deprecated-quantization"):
            yield _fault(
                option, "bad-value", f"{self._title} refuses the deprecated method {value!r}",
                OMIT_QUANTIZATION + ", or set allow-deprecated-quantization",
            )  # fmt: skip
            return
        if checkpoint.quantization in (None, UNKNOWN) or not self._plain:
            return
        method = _method(checkpoint.quantization)
        if method == NONE:
            if value == COMPRESSED_TENSORS or (value == "fp8" and value not in facts.online):
                fp8 = [name for name in facts.online if name.startswith("fp8")]
                other = f", or to quantize while loading: {_some(fp8)}" if fp8 else ""
                yield _fault(
                    option, "checkpoint",
                    f"the checkpoint is not quantized, and {self._title} does not make it {value}",
                    f"leave it out{other}",
                )  # fmt: skip
        elif value != method and value not in facts.replacing:
            online = " (it quantizes BF16 checkpoints)" if value in facts.online else ""
            yield _fault(
                option, "checkpoint",
                f"{value!r}{online} contradicts the checkpoint, which is {checkpoint.quantization}",
                OMIT_QUANTIZATION,
            )  # fmt: skip

    def _cache_type(
        self, option: str, value: str, options: Mapping[str, Any], checkpoint: Checkpoint
    ) -> Iterator[Fault]:
        """A cache of the model's own type has to be of the model's type."""
        served = options.get("dtype", "auto")
        served = checkpoint.dtype if served == "auto" else {"half": "float16"}.get(served, served)
        if served in CACHE_TYPES and served != value:
            yield _fault(
                option, "checkpoint", f"{value!r} is not the model's type, {served}",
                "leave it out: auto is the model's type",
            )  # fmt: skip


def _is_map(value: Any) -> bool:
    """Whether a value is a map or JSON for one, or nothing."""
    return value is None or isinstance(value, dict) or isinstance(_container(value), dict)


def _no_map(release: str, option: str, value: Any) -> Fault:
    message = f"{title(release)} does not take {_shown(value)}, expected a map (JSON)"
    return _fault(option, "bad-value", message, MAP_REMEDY)


def full_names(table: OptionTable, start: str) -> list[str]:
    """The options that argparse would take ``start`` for, by their full spelling."""
    return [name for name in table.names if name.startswith(start)]


def fits(facts: OptionFacts, text: str | None) -> bool:
    """Whether an option takes a word: its kind, the choices, the bounds of the config."""
    if text is None or (text.startswith("-") and _number(text) is None):
        return False  # argparse takes it for another option
    if facts.takes and not kinds(text) & set(facts.takes):
        return False
    if facts.choices and not (facts.optional and text in ("", "None")):
        return text in [str(choice) for choice in facts.choices]
    number = _number(text)
    if number is None or (text.lower() == "auto" and "auto" in facts.takes):
        return True
    return not (
        (facts.above is not None and not number > facts.above)
        or (facts.at_least is not None and not number >= facts.at_least)
        or (facts.below is not None and not number < facts.below)
        or (facts.at_most is not None and not number <= facts.at_most)
    )


def kinds(text: str) -> set[str]:
    """The kinds of values that a word is; lab/option_reader.py has a sample of each."""
    found = {"word"}
    try:
        found.add("negative" if int(text) < 0 else "integer")
    except ValueError:
        if _SIZE.fullmatch(text):
            found.add("size")
    try:
        float(text)
        found.add("number")
    except ValueError:
        pass
    if text.lower() == "auto":
        found.add("auto")
    if text in ("", "None"):
        found.add("none")
    if text in ("true", "false", "null"):
        found.add("literal")
    container = _container(text)
    if container is not None:
        found.add("object" if isinstance(container, dict) else "array")
    return found


_SIZE = re.compile(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]")
"""vLLM's numbers with a decimal (k) or a binary (K) unit."""
_UNITS: dict[str, int] = {unit: 1000**n for n, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**n for n, unit in enumerate("KMGT", 1)}


def _number(text: str) -> float | None:
    """The number that a word is for vLLM; 32k is 32,000."""
    if _SIZE.fullmatch(text):
        return float(text[:-1]) * _UNITS[text[-1]]
    try:
        return float(text)
    except ValueError:
        return None


def _container(text: Any) -> Any:
    """The JSON map or list that a word is; None: neither."""
    if not isinstance(text, str) or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _map(value: Any) -> Mapping[str, Any]:
    found = value if isinstance(value, dict) else _container(value)
    return found if isinstance(found, dict) else {}


def _without_theta(option: str, value: Any) -> dict[str, Any]:
    left = {key: item for key, item in _map(value).items() if key != "rope_theta"}
    return {option: left} if left else {}


def _text(value: Any) -> str | None:
    """The word that vLLM makes of a YAML value; None: of numbers with thousands of digits."""
    try:
        return str(value)
    except ValueError:
        return None


def _shown(value: Any) -> str:
    return "a number of thousands of digits" if _text(value) is None else shown(value)


def _json(value: Any) -> str | None:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _method(quantization: str | None) -> str:
    """vLLM's name of the method of a checkpoint's quantization."""
    name = quantization or NONE
    for method in (COMPRESSED_TENSORS, "fp8", "modelopt"):
        if name == method or name.startswith(f"{method}-"):
            return method
    return name


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)


_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "size": "32k or 4K",
    "auto": "auto",
    "none": "None",
    "object": "a map (JSON)",
    "array": "a list (JSON)",
}


def _expected(facts: OptionFacts) -> str:
    if facts.choices:
        return f"one of {_some([str(choice) for choice in facts.choices])}"
    if facts.flag:
        return "true or false"
    named = [kind for kind in _KINDS if kind in facts.takes]
    if "number" in named:
        named.remove("integer")
    texts = [_KINDS[kind] for kind in named] or ["a text"]
    marks = {
        "above": facts.above,
        "at least": facts.at_least,
        "below": facts.below,
        "at most": facts.at_most,
    }
    bounds = [f"{word} {mark}" for word, mark in marks.items() if mark is not None]
    return " or ".join(texts) + (f" {' and '.join(bounds)}" if bounds else "")
