"""Inspects a checkpoint by its headers: is it whole, what is it, and what does it ask for.

Only config.json, the index and the shards' headers are read, a few MB of any checkpoint. What
cannot be seen this way: the values. Zeroed or flipped bytes inside a tensor and NaNs need the
manifest's SHA256.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8fleet.architecture import Architecture, config_problems, read_architecture, text_config
from fp8fleet.config_json import Config
from fp8fleet.errors import OperatorError
from fp8fleet.findings import AGAIN, SAME_REVISION, Finding, Findings
from fp8fleet.headers import Header, HeaderError, Tensor, read_header, what_instead
from fp8fleet.jsonfile import JsonError, parse_python_json, read_regular, shown
from fp8fleet.quantization import quantization_config, quantization_name
from fp8fleet.quantized import CONFIG, NO_WEIGHTS, check_quantized, weight_of_scale
from fp8fleet.schemes import Quantization, read_quantization
from fp8fleet.tensor_parallel import (
    LAYER,
    TensorParallel,
    has_attention,
    is_language_model,
    module_of,
    tensor_parallel,
)

INDEX = "model.safetensors.index.json"
_SHARD = ".safetensors"

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of an element. Source: Dtype in safetensors/src/tensor.rs of safetensors 0.8."""

_NUMBERED = re.compile(r"(.+)-([0-9]+)-of-([0-9]+)\.safetensors")
_ANY_NUMBER = re.compile(r"\.[0-9]+\.")
_MOST_NAMED = 20
"""Missing shards that are named; a file's name can announce any number of them."""
_PUBLISHED = "take config.json from the checkpoint's publisher"


@dataclass(frozen=True)
class Contents:
    """What the headers add up to."""

    shards: int
    tensors: int
    parameters: int
    """Elements of all tensors but scales and zero points."""
    bytes: int
    bytes_by_dtype: Mapping[str, int]
    scale_tensors: int
    scales: int
    """Elements of the scales of weights."""
    scale_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """What an inspection tells."""

    architecture: Architecture | None
    """None: config.json cannot be read."""
    quantization: str | None
    """As `quantization_name` names it; None: config.json cannot be read."""
    block: tuple[int, int] | None
    """Rows and columns of a block of weights that share a scale."""
    contents: Contents
    tensor_parallel: TensorParallel
    findings: tuple[Finding, ...]
    """Errors first."""

    @property
    def whole(self) -> bool:
        """Whether nothing was found that forbids to serve it."""
        return all(finding.severity != "error" for finding in self.findings)


def inspect_directory(directory: Path, stored: Mapping[str, Header] | None = None) -> Checkpoint:
    """Inspect a model directory.

    Args:
        directory: with config.json and ``*.safetensors``, as vLLM loads it.
        stored: the headers that the shards should have, by file name.

    Raises:
        OperatorError: it is not a model directory: neither config.json nor a shard is in it.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except FileNotFoundError:
        raise OperatorError(f"{directory}: no such directory, expected that of a model") from None
    except OSError as error:
        raise OperatorError(f"{directory}: cannot be listed: {error.strerror}") from None
    present = {name for name in names if name.endswith(_SHARD)}
    if not present and CONFIG not in names:
        raise OperatorError(
            f"{directory}: is not a model directory: neither {CONFIG} nor *{_SHARD} is in it"
        )
    findings = Findings()
    config = _read_config(directory, names, findings)
    index = _read_json(directory / INDEX, findings)
    shards = _loaded(index, present, findings)
    headers = {}
    for name in shards:
        header = _read_shard(directory / name, findings)
        if header is not None:
            headers[name] = header
    if index is not None:
        _compare_with_index(index, headers, findings)
    if stored is not None:
        _compare_with_stored(stored, headers, shards, findings)
    complete = len(headers) == len(shards) and not findings.has("shard-missing")
    return _inspect(config, headers, findings, complete)


def inspect_known(config: Config, headers: Mapping[str, Header]) -> Checkpoint:
    """Inspect a checkpoint that is elsewhere, by its config.json and its stored headers."""
    return _inspect(config, headers, Findings(), complete=True)


def _inspect(
    config: Config | None, headers: Mapping[str, Header], findings: Findings, complete: bool
) -> Checkpoint:
    """What both ways have in common.

    Args:
        complete: whether all shards are there and readable; what they would hold is else not told
            to be missing once more.
    """
    tensors, files = _all_tensors(headers, findings)
    if complete and headers and not tensors:
        message = "the shards hold no tensor: there are no weights to load"
        findings.add("no-tensors", message, "fetch the model again, or from another source")
    architecture = read_architecture(config) if config is not None else None
    quantization = read_quantization(config or {}, _quantizable(tensors))
    if config is not None and architecture is not None:
        _check_config(config, architecture, findings)
        if complete and tensors:
            _check_architecture(architecture, quantization, tensors, findings)
            _check_heads(config, architecture, tensors, findings)
        check_quantized(quantization, tensors, files, architecture, findings, complete)
    return Checkpoint(
        architecture=architecture,
        quantization=quantization_name(config) if config is not None else None,
        block=next((s.block for s in quantization.schemes if s.block), None),
        contents=_contents(headers, tensors),
        tensor_parallel=tensor_parallel(architecture, quantization, tensors)
        if architecture
        else TensorParallel((), {}),
        findings=findings.sorted(),
    )


# --- files --------------------------------------------------------------------------------------


def _read_json(path: Path, findings: Findings, needed: bool = False) -> dict[str, Any] | None:
    """A JSON object.

    Args:
        needed: whether it is an error that the file is not there.

    Returns:
        None: it is not there, or it is something else, which is found.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        if needed:
            findings.add("config-missing", "is missing", SAME_REVISION, path.name)
        return None
    except OSError as error:
        findings.add("unreadable", _why(error), "check the disk and permissions", path.name)
        return None
    instead = what_instead(content)
    if instead is not None:
        findings.add(instead[0], f"is {instead[1]}, not JSON", AGAIN, path.name)
        return None
    try:
        value, twice = parse_python_json(content)
    except JsonError as error:
        findings.add("not-json", f"is not JSON: {error}", AGAIN, path.name)
        return None
    if not isinstance(value, dict):
        findings.add("not-json", "is not a JSON object", AGAIN, path.name)
        return None
    if twice:
        message = f"names {shown(twice[0])} twice, of which the last counts"
        findings.add("key-twice", message, SAME_REVISION, path.name, severity="warning")
    return value


def _why(error: OSError) -> str:
    return f"cannot be read: {error.strerror}"


def _read_config(directory: Path, names: set[str], findings: Findings) -> dict[str, Any] | None:
    config = _read_json(directory / CONFIG, findings, needed=True)
    if config is None or quantization_config(config) is not None:
        return config
    # Files of their own, which vLLM and vllm-ascend read too (get_config_filenames).
    modelopt = _read_json(directory / "hf_quant_config.json", findings)
    if modelopt is not None:
        inner = modelopt.get("quantization")
        found = inner if isinstance(inner, dict) else {}
        return {**config, "quantization_config": {"quant_method": "modelopt", **found}}
    if "quant_model_description.json" in names:
        return {**config, "quantization_config": {"quant_method": "ascend"}}
    return config


def _loaded(index: Mapping[str, Any] | None, present: set[str], findings: Findings) -> list[str]:
    """The shards that vLLM loads, sorted; what is missing or too many is found.

    With an index those that it names, else every ``*.safetensors`` (_prepare_weights in
    vllm/model_executor/model_loader/default_loader.py; before 0.32 a missing one is not noticed).
    """
    if not present:
        message = f"no *{_SHARD} in the directory: there are no weights to load"
        findings.add("no-weights", message, "fetch the model again, in safetensors format")
    if any(n.startswith("consolidated") for n in present) and index is not None:
        message = "vLLM loads consolidated*.safetensors in place of the indexed shards"
        remedy = "leave them out of the manifest, or serve with --load-format hf"
        findings.add("consolidated", message, remedy, severity="warning")
    named = _weight_map(index).values()
    if index is None or not named:
        _check_numbers(present, findings)
        return sorted(present)
    for name in sorted(set(named) - present):
        findings.add("shard-missing", f"is missing, {INDEX} names it", AGAIN, name)
    for name in sorted(present - set(named)):
        if not name.startswith("consolidated"):
            message = f"is not in {INDEX}: it is not loaded"
            findings.add("shard-unlisted", message, "remove it", name, severity="warning")
    return sorted(set(named) & present)


def _weight_map(index: Mapping[str, Any] | None) -> dict[str, str]:
    """File by tensor, as the index has it."""
    named = index.get("weight_map") if index else None
    if not isinstance(named, Mapping):
        return {}
    return {tensor: file for tensor, file in named.items() if isinstance(file, str)}


def _check_numbers(present: set[str], findings: Findings) -> None:
    """Without an index, names such as model-00001-of-00003.safetensors tell what is missing."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in present:
        match = _NUMBERED.fullmatch(name)
        if match:
            prefix, number, total = match.groups()
            series.setdefault((prefix, total), set()).add(int(number))
    for (prefix, total), numbers in sorted(series.items()):
        wanted = range(1, int(total) + 1)
        absent = (number for number in wanted if number not in numbers)
        for number in itertools.islice(absent, _MOST_NAMED):
            name = f"{prefix}-{number:0{len(total)}}-of-{total}.safetensors"
            findings.add("shard-missing", "is missing, by the others' numbers", AGAIN, name)
        more = int(total) - sum(number in wanted for number in numbers) - _MOST_NAMED
        if more > 0:
            message = f"{more} more shards of {prefix} are missing, by the others' numbers"
            findings.add("shard-missing", message, "fetch the model again")


_HEADER_REMEDIES = {
    "lfs-pointer": "it comes from a clone without `git lfs pull`: fetch the file itself",
    "html": "the source answered with a web page: fetch the file again, from another source",
    "text": "the source answered with a message: fetch the file again, from another source",
}


def _read_shard(path: Path, findings: Findings) -> Header | None:
    """A shard's header, if it has one; that it covers the file exactly is checked."""
    try:
        header = read_header(path)
        size = path.stat().st_size
    except HeaderError as error:
        code = error.code if error.code in (*_HEADER_REMEDIES, "empty", "truncated") else ""
        remedy = _HEADER_REMEDIES.get(error.code, AGAIN)
        findings.add(code or f"header-{error.code}", error.reason, remedy, path.name)
        return None
    except OSError as error:
        findings.add("unreadable", _why(error), "check the disk and permissions", path.name)
        return None
    _check_coverage(path.name, header, size - (header.data_start or 0), findings)
    return header


def _check_coverage(file: str, header: Header, data: int, findings: Findings) -> None:
    """Every byte of the data belongs to exactly one tensor.

    As `Metadata::validate` in safetensors/src/tensor.rs demands.

    Args:
        data: bytes behind the header.
    """
    position = 0
    for name, tensor in sorted(header.tensors.items(), key=lambda i: (i[1].begin, i[1].end)):
        if tensor.begin > position:
            hole = tensor.begin - position
            message = f"begins {hole} bytes behind the tensor before it: a hole"
            findings.add("hole", message, AGAIN, file, name)
        elif tensor.begin < position:
            message = f"begins {position - tensor.begin} bytes inside the tensor before it"
            findings.add("overlap", message, AGAIN, file, name)
        position = max(position, tensor.end)
        _check_tensor_size(file, name, tensor, findings)
    if position > data:
        message = f"ends {position - data} bytes before the end of its last tensor: truncated"
        findings.add("truncated", message, AGAIN, file)
    elif position < data:
        message = f"has {data - position} bytes behind its last tensor"
        findings.add("trailing-bytes", message, AGAIN, file)


def _check_tensor_size(file: str, name: str, tensor: Tensor, findings: Findings) -> None:
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        message = f"has dtype {tensor.dtype}, which safetensors does not know"
        findings.add("dtype-unknown", message, AGAIN, file, name)
        return
    size, rest = divmod(math.prod(tensor.shape) * bits, 8)
    if tensor.end - tensor.begin != size or rest:
        message = (
            f"has {tensor.end - tensor.begin} bytes, {tensor.dtype} {list(tensor.shape)}"
            f" takes {size}{' and a part of one' if rest else ''}"
        )
        findings.add("tensor-size", message, AGAIN, file, name)


# --- tensors ------------------------------------------------------------------------------------


def _compare_with_index(
    index: Mapping[str, Any], headers: Mapping[str, Header], findings: Findings
) -> None:
    named = _weight_map(index)
    if not named:
        message = "has no weight_map of tensors to files"
        findings.add("index-empty", message, SAME_REVISION, INDEX)
        return
    for name in index["weight_map"].keys() - named.keys():
        findings.add("index-entry", "has no file's name", SAME_REVISION, INDEX, name)
    holders: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header.tensors:
            holders.setdefault(name, []).append(file)
    for name, file in named.items():
        if file not in headers or name in headers[file].tensors:
            continue  # what a missing or unreadable shard lacks is not told again
        if name in holders:
            message = f"is in {holders[name][0]}, {INDEX} says {file}"
            findings.add("tensor-misplaced", message, SAME_REVISION, file, name, "warning")
        else:
            message = f"is not in the shard, {INDEX} names it"
            findings.add("tensor-missing", message, SAME_REVISION, file, name)
    for name, files in holders.items():
        if name not in named:
            message = f"is in the shard, {INDEX} does not name it"
            findings.add("tensor-extra", message, SAME_REVISION, files[0], name, "warning")


def _compare_with_stored(
    stored: Mapping[str, Header],
    headers: Mapping[str, Header],
    shards: Iterable[str],
    findings: Findings,
) -> None:
    """The shards have the headers that were stored with the manifest."""
    remedy = "fetch the model again, or create the manifest and its headers anew"
    for file in shards:
        if file not in stored:
            findings.add("shard-unknown", "is not in the stored headers", remedy, file)
    for file in stored:
        if file not in shards:
            findings.add("shard-missing", "is missing, the stored headers have it", AGAIN, file)
    for file in sorted(stored.keys() & headers.keys()):
        expected, got = stored[file].tensors, headers[file].tensors
        for name in expected.keys() - got.keys():
            message = "is not in the shard, the stored header has it"
            findings.add("tensor-missing", message, remedy, file, name)
        for name, tensor in got.items():
            if expected.get(name) != tensor:
                message = (
                    f"is {_described(tensor)}, the stored header has {_described(expected[name])}"
                    if name in expected
                    else "is in the shard, the stored header does not have it"
                )
                findings.add("header-differs", message, remedy, file, name)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} at {tensor.begin}"


def _all_tensors(
    headers: Mapping[str, Header], findings: Findings
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors by name, and the file of each."""
    tensors: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in files:
                message = f"is in {files[name]} too: which one is loaded is chance"
                findings.add("tensor-duplicate", message, SAME_REVISION, file, name)
            else:
                tensors[name], files[name] = tensor, file
    return tensors, files


def _contents(headers: Mapping[str, Header], tensors: Mapping[str, Tensor]) -> Contents:
    by_dtype: Counter[str] = Counter()
    parameters = scale_tensors = scales = scale_bytes = 0
    for name, tensor in tensors.items():
        size, elements = tensor.end - tensor.begin, math.prod(tensor.shape)
        by_dtype[tensor.dtype] += size
        if weight_of_scale(name) in tensors:
            scale_tensors, scales = scale_tensors + 1, scales + elements
            scale_bytes += size
        elif not name.endswith(NO_WEIGHTS):
            parameters += elements
    return Contents(
        shards=len(headers),
        tensors=len(tensors),
        parameters=parameters,
        bytes=sum(by_dtype.values()),
        bytes_by_dtype=dict(sorted(by_dtype.items())),
        scale_tensors=scale_tensors,
        scales=scales,
        scale_bytes=scale_bytes,
    )


def _quantizable(tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules of tensors that may be weights of linear layers."""
    return [
        module_of(name)
        for name, tensor in tensors.items()
        if len(tensor.shape) in (2, 3) and not name.endswith(NO_WEIGHTS)
    ]


def _check_config(config: Config, architecture: Architecture, findings: Findings) -> None:
    """config.json says what an engine has to know, and nothing that cannot be."""
    wrong, context = config_problems(config)
    for problem in wrong:
        findings.add("config-value", problem.message, _PUBLISHED, CONFIG)
    for problem in context:
        findings.add("config-value", problem.message, _PUBLISHED, CONFIG, severity="warning")
    if architecture.model_type is None and not {"auto_map", "speculators_config"} & config.keys():
        # AutoConfig of transformers then guesses by the directory's name, or gives up.
        message = "names no model_type: transformers cannot know its class"
        findings.add("no-model-type", message, _PUBLISHED, CONFIG)
    if architecture.name is None and "architectures" not in {problem.key for problem in wrong}:
        message = "names no architectures: vLLM cannot know the model"
        findings.add("no-architecture", message, SAME_REVISION, CONFIG, severity="warning")
    if architecture.layers is None and "num_hidden_layers" not in text_config(config):
        message = (
            "has no num_hidden_layers: the engine takes its class's default, and whether all"
            " layers are there is not checked here"
        )
        findings.add("config-incomplete", message, _PUBLISHED, CONFIG, severity="warning")


def _check_architecture(
    architecture: Architecture,
    quantization: Quantization,
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> None:
    """The layers and the keys' rows that config.json promises are there."""
    found = {
        int(match[1])
        for name in tensors
        if is_language_model(name) and not name.startswith("mtp.") and (match := LAYER.search(name))
    }
    missing = sorted(set(range(architecture.layers or 0)) - found)
    # Some architectures have another name for their layers, but all number them.
    if missing and (found or not any(map(_ANY_NUMBER.search, tensors))):
        message = (
            f"config.json has {architecture.layers} layers, {len(missing)} of them are in no shard:"
            f" {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}"
        )
        findings.add("layer-missing", message, f"fetch what is missing, or {SAME_REVISION}")
    _check_key_rows(architecture, quantization, tensors, findings)


def _check_heads(
    config: Config,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> None:
    """Attention has heads; how many decides what fits and what can be divided."""
    told = {problem.key for problem in config_problems(config)[0]}
    if architecture.heads or "num_attention_heads" in told or not has_attention(tensors):
        return
    message = (
        "num_attention_heads is missing or no number, though the headers have attention: the engine"
        " takes its class's default, and `fp8fleet plan` refuses the model"
    )
    findings.add("config-incomplete", message, _PUBLISHED, CONFIG, severity="warning")


def _check_key_rows(
    architecture: Architecture,
    quantization: Quantization,
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> None:
    """k_proj has KV heads x head dimension rows in every usual architecture."""
    expected = {g.kv_heads * g.head_dim for g in architecture.groups if g.kv_heads and g.head_dim}
    if not expected or architecture.latent_dim or not quantization.checked:
        return
    for name, tensor in tensors.items():
        if not name.endswith("self_attn.k_proj.weight") or not is_language_model(name):
            continue
        if len(tensor.shape) != 2 or tensor.shape[0] not in expected:
            message = (
                f"has shape {list(tensor.shape)}, but KV heads x head_dim of config.json make"
                f" {' or '.join(map(str, sorted(expected)))} rows"
            )
            findings.add("config-heads", message, SAME_REVISION, CONFIG, name, "warning")
