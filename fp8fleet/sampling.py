"""Sampling parameters of requests that name none: from where a server has them.

vLLM takes them from the model's generation_config.json, and its option override-generation-config
over these (get_diff_sampling_param in vllm/config/model.py, 0.19.1-0.33.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import JsonError, parse_python_json, read_regular, shown
from fp8fleet.spec import GENERATION_CONFIG, SamplingSpec

FILE = "generation_config.json"
_SOURCE = "generation-config"
"""vLLM's option for where the file is; `vllm`: none is read."""
_MOST = "max_new_tokens"
"""The generation config's word for max_tokens."""
_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", _MOST)


@dataclass(frozen=True)
class Sampling:
    """The parameters that a server gives to requests that name none."""

    values: Mapping[str, Any]
    """By vLLM's names; empty: vLLM's own defaults."""
    sources: Mapping[str, str]
    """Where each value stands."""
    otherwise: str
    """Where all else comes from."""

    def doubts(self) -> list[str]:
        """One line for each value that no request can have; SamplingSpec has the ranges."""
        found = []
        for key, value in self.values.items():
            try:
                SamplingSpec.model_validate({key: value})
            except ValidationError as error:
                named = f"sampling: {key}={shown(value)} ({self.sources[key]})"
                found.append(
                    f"{named}: {error.errors()[0]['msg']}; requests that name none get it and may"
                    f" fail: set {key} in sampling"
                )
        return found

    def __str__(self) -> str:
        named = [f"{key}={shown(self.values[key])} ({self.sources[key]})" for key in self.values]
        return "; ".join([*named, f"else {self.otherwise}"])


def sampling_option(sampling: SamplingSpec) -> dict[str, Any]:
    """The value of vLLM's option for ``sampling``."""
    values = sampling.values()
    return {_MOST if key == "max_tokens" else key: value for key, value in values.items()}


def sampling_of(options: Mapping[str, Any], manifest: Path, root: Path) -> Sampling:
    """What a server with ``options`` will give.

    Args:
        manifest: of the model, relative to ``root``; the model's own file lies beside it.

    Raises:
        OperatorError: the file is broken.
    """
    where = options.get(_SOURCE, "auto")
    values: dict[str, Any] = {}
    otherwise = "vLLM's own defaults"
    if where == "auto":
        own = manifest.with_name(FILE)
        found = _read(root / own)
        if found is None:
            otherwise = f"what the model's {FILE} says, of which {own.parent} has no copy"
        values = {key: (value, str(own)) for key, value in _known(found or {}).items()}
    elif where != "vllm":
        otherwise = f"the {FILE} of {where}"
    values |= {key: (v, "inventory") for key, v in _known(_override(options)).items()}
    return Sampling(
        {key: value for key, (value, _) in values.items()},
        {key: source for key, (_, source) in values.items()},
        otherwise,
    )


def _known(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a generation config what vLLM takes, by its own names."""
    return {
        "max_tokens" if key == _MOST else key: config[key]
        for key in _PARAMETERS
        if config.get(key) is not None
    }


def _override(options: Mapping[str, Any]) -> Mapping[str, Any]:
    given = options.get(GENERATION_CONFIG, {})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise OperatorError(
                f"option {GENERATION_CONFIG!r} is {shown(given)}: a table or its JSON is needed"
            ) from None
    return given if isinstance(given, dict) else {}


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = parse_python_json(read_regular(path))[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise OperatorError(f"{path}: not JSON: {error}: create the manifest anew") from None
    if not isinstance(value, dict):
        raise OperatorError(f"{path}: not an object: create the manifest anew")
    return value
