"""Prints the options of `vllm serve` as JSON: runs inside a release's environment, alone.

The parser is the release's own, built as its `vllm` command builds it; what a value may be is asked
of the parser's own converters, the bounds are those of its pydantic config classes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import transformers
from pydantic import ValidationError

SAMPLES = {
    "word": ("x-y",),
    "integer": ("7",),
    "negative": ("-7",),
    "number": ("0.5",),
    "size": ("32k", "4K"),
    "auto": ("auto",),
    "none": ("None",),
    "object": ('{"x": 1}', "{}"),
    "array": ('["x"]', "[]"),
    "literal": ("true",),
}
"""Kinds of values, each with samples: a converter takes the kind if it takes any of them.
What takes words takes any text: nothing is noted then."""

BOUNDS = {"gt": "above", "ge": "at_least", "lt": "below", "le": "at_most"}


class Origin(str):
    """A help text that knows the field of a config class from which an option was made."""

    cls: Any
    field: str


def main() -> int:
    _pretend_cuda()
    _note_origins()
    parser = _serve_parser()
    spellings: dict[argparse.Action, list[str]] = {}
    for text, action in parser._option_string_actions.items():
        spellings.setdefault(action, []).append(text)
    options = {}
    for action, texts in spellings.items():
        names = [text[2:] for text in texts if text.startswith("--")]
        if not isinstance(action, argparse._HelpAction):
            short = [text[1:] for text in texts if not text.startswith("--")]
            options[names[0]] = _option(action, parser, names, short) | _later(action, parser)
    _quantization(options["quantization"])
    major = int(transformers.__version__.split(".")[0])
    report = {"false": _false(parser), "transformers": major, "options": options}
    print(json.dumps(report))
    return 0


def _pretend_cuda() -> None:
    """Without a GPU no platform is found, and a config class of some releases refuses that."""
    from vllm.platforms.interface import UnspecifiedPlatform

    UnspecifiedPlatform.device_type = "cuda"


def _note_origins() -> None:
    """Has the release note from which field of which config class it makes an option."""
    from vllm.engine import arg_utils

    real = arg_utils.get_kwargs

    def noting(cls: Any) -> Any:
        options = real(cls)
        for field, arguments in options.items():
            arguments["help"] = Origin(arguments.get("help") or "")
            arguments["help"].cls, arguments["help"].field = cls, field
        return options

    arg_utils.get_kwargs = noting


def _serve_parser() -> Any:
    """The parser of `vllm serve`, as the release's `vllm` makes it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    top = FlexibleArgumentParser(prog="vllm")
    return ServeSubcommand().subparser_init(top.add_subparsers(required=False, dest="subparser"))


def _option(
    action: argparse.Action, parser: Any, names: list[str], short: list[str]
) -> dict[str, Any]:
    """What the parser knows of one option; what goes without saying is left out."""
    entry: dict[str, Any] = {"aliases": names[1:], "short": short}
    default = _plain(action.default)
    if action.nargs == 0:
        means = _sets(action, parser, f"--{names[0]}")
        denials = [name for name in names if _sets(action, parser, f"--{name}") != means]
        entry["flag"] = True
        entry["aliases"] = [name for name in names[1:] if name not in denials]
        entry["denials"] = denials
    else:
        takes = [kind for kind, texts in SAMPLES.items() if _takes(action, parser, texts)]
        if not takes:
            raise RuntimeError(f"--{names[0]} takes none of the samples: add one that it takes")
        entry["takes"] = [] if "word" in takes else takes
        entry["choices"] = [choice for choice in action.choices or () if choice is not None]
        entry["optional"] = (None in action.choices) if action.choices else None
        entry["nargs"] = action.nargs
    entry["default"] = default
    # argparse's own mark is used by no release so far; all say it in the help
    marked = getattr(action, "deprecated", False) or "is deprecated" in (action.help or "")
    entry["deprecated"] = marked
    kept = {key: value for key, value in entry.items() if value is not None and value != []}
    return {key: value for key, value in kept.items() if key == "default" or value is not False}


def _sets(action: argparse.Action, parser: Any, text: str) -> Any:
    """What a flag that is written as ``text`` sets."""
    namespace = argparse.Namespace()
    with contextlib.redirect_stdout(sys.stderr):
        action(parser, namespace, [], text)
    return getattr(namespace, action.dest)


def _takes(action: argparse.Action, parser: Any, texts: tuple[str, ...]) -> bool:
    for text in texts:
        # converters answer whatever they like, and a few print a warning
        with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
            parser._get_value(action, text)
            return True
    return False


def _plain(default: Any) -> Any:
    """The default as far as TOML can say it; an option that is off by default needs none."""
    if default == argparse.SUPPRESS:
        return None
    if isinstance(default, bool | int | float | str):
        return default
    if isinstance(default, list | tuple) and all(isinstance(item, str) for item in default):
        return list(default)
    return None


def _later(action: argparse.Action, parser: Any) -> dict[str, Any]:
    """What the config class that the option is for says of its values, beyond the parser."""
    origin = action.help
    if not isinstance(origin, Origin):
        return {}
    field = getattr(origin.cls, "__pydantic_fields__", {}).get(origin.field)
    if field is None:
        return {}
    marks = list(field.metadata)
    words: list[str] = []
    for part in get_args(field.annotation):
        if get_origin(part) is Literal:
            words += get_args(part)
        for mark in getattr(part, "__metadata__", ()):  # Annotated[int, Field(gt=0)] | None
            marks += getattr(mark, "metadata", [mark])
    bounds = {
        ours: getattr(mark, theirs)
        for mark in marks
        for theirs, ours in BOUNDS.items()
        if getattr(mark, theirs, None) is not None
    }
    if words and action.choices is None and _refuses_other_words(origin):
        return bounds | {"later": sorted(words)}
    parts = [part for part in (field.annotation, *get_args(field.annotation)) if is_dataclass(part)]
    if parts and _takes(action, parser, ("{}",)) and not _takes(action, parser, ('{"x": 1}',)):
        return bounds | {"keys": sorted(part.name for part in fields(parts[0]) if part.init)}
    return bounds


def _refuses_other_words(origin: Origin) -> bool:
    try:
        origin.cls(**{origin.field: "x-y"})
    except ValidationError as error:
        return any(found["loc"][:1] == (origin.field,) for found in error.errors())
    except Exception:  # it lacks what else it needs
        return False
    return False


def _quantization(entry: dict[str, Any]) -> None:
    """What the config checks later: the parser takes any word as a method."""
    from vllm.model_executor.layers import quantization as package

    names = sorted(package.QUANTIZATION_METHODS)
    entry["later"] = names
    entry["deprecated_values"] = sorted(getattr(package, "DEPRECATED_QUANTIZATION_METHODS", ()))
    entry["online"] = [name for name in names if name in _online() or _quantizes(package, name)]
    entry["replacing"] = [name for name in names if _replaces(package, name)]


def _online() -> list[str]:
    """Methods that quantize a BF16 checkpoint while it is loaded."""
    try:
        from vllm.config import quantization
    except ImportError:  # before 0.20
        return []
    if hasattr(quantization, "_ONLINE_SHORTHANDS"):
        return ["online", *quantization._ONLINE_SHORTHANDS]
    if hasattr(quantization, "OnlineQuantScheme"):
        return ["online", *(scheme.value for scheme in quantization.OnlineQuantScheme)]
    return []


def _quantizes(package: Any, name: str) -> bool:
    """Whether ``fp8`` itself still does that."""
    if name != "fp8":
        return False
    with contextlib.suppress(ValueError):
        package.get_quantization_config(name)(is_checkpoint_fp8_serialized=False)
        return True
    return False


def _replaces(package: Any, name: str) -> bool:
    """Whether a method may stand in for the one that a checkpoint names."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    try:
        own = package.get_quantization_config(name).override_quantization_method
    except (ImportError, AttributeError):
        return True  # its module needs a GPU's packages: not known
    return own.__func__ is not QuantizationConfig.override_quantization_method.__func__


def _false(parser: Any) -> str:
    """What becomes of `enable-prefix-caching: false` in a YAML file of options."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "options.yaml"
        path.write_text("enable-prefix-caching: false\n")
        words = parser.load_config_file(str(path))
    return "denied" if words == ["--no-enable-prefix-caching"] else "ignored" if not words else "?"


if __name__ == "__main__":
    sys.exit(main())
