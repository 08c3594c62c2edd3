"""Checkpoints that are whole and checkpoints that are broken, each real files on a disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    LLAMA,
    QUANTIZATIONS,
    Model,
    entries_of,
    linear,
    llama_tensors,
    shard_bytes,
)

from fp8fleet import hostcli, inspect_cli, patterns
from fp8fleet.checkpoint import Checkpoint, inspect_directory, inspect_known
from fp8fleet.errors import OperatorError
from fp8fleet.findings import Finding
from fp8fleet.headers import Header, header_of_entries, headers_text, read_header
from fp8fleet.manifest import INSPECTED

Q_PROJ = "model.layers.0.self_attn.q_proj"
LAYOUTS = sorted(QUANTIZATIONS)
BARE = '{"architectures": ["X"], "model_type": "x", "num_hidden_layers": 1}'
"""The least that a config.json says."""
A, B = "layers.0.a", "layers.0.b"


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A whole FP8_BLOCK model, not yet written."""
    return Model(tmp_path / "model")


def errors(found: Checkpoint) -> list[Finding]:
    """The findings that forbid to serve."""
    assert found.whole is not any(f.severity == "error" for f in found.findings)
    return [finding for finding in found.findings if finding.severity == "error"]


def only(found: Checkpoint) -> Finding:
    """The one finding there is."""
    assert len(found.findings) == 1, found.findings
    assert found.findings[0].remedy
    return found.findings[0]


def codes(found: Checkpoint) -> list[str]:
    """The findings' codes, errors first."""
    return [finding.code for finding in found.findings]


# --- whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("indexed", [True, False])
def test_a_whole_checkpoint_has_no_finding(tmp_path: Path, layout: str, indexed: bool) -> None:
    model = Model(tmp_path, layout)
    model.indexed = indexed
    assert inspect_directory(model.write()).findings == ()


@pytest.mark.parametrize(
    ("layout", "name", "block"),
    [
        ("none", "none", None),
        ("ct-block", "compressed-tensors-fp8-block", (128, 128)),
        ("deepseek", "fp8-block", (128, 128)),
        ("ct-channel", "compressed-tensors-fp8-channel", None),
        ("ct-tensor-static", "compressed-tensors-fp8-tensor", None),
        ("fp8-tensor", "fp8", None),
        ("int8", "compressed-tensors-int8-channel", None),
    ],
)
def test_the_quantization_is_told(
    tmp_path: Path, layout: str, name: str, block: tuple[int, int] | None
) -> None:
    found = inspect_directory(Model(tmp_path, layout).write())
    assert (found.quantization, found.block) == (name, block)


def test_parameters_bytes_and_scales_are_counted_from_the_headers(model: Model) -> None:
    contents = inspect_directory(model.write()).contents
    # a layer: q and o of 256 x 256, k and v of 128 x 256, three of 512 x 256
    weights = LAYERS * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    plain = 2 * 384 * 256 + LAYERS * 256
    scales = LAYERS * (2 * 2 * 2 + 2 * 1 * 2 + 3 * 4 * 2)
    assert contents.parameters == weights + plain
    assert (contents.scales, contents.scale_tensors) == (scales, LAYERS * 7)
    assert contents.scale_bytes == 2 * scales
    assert contents.bytes_by_dtype == {"BF16": 2 * (plain + scales), "F8_E4M3": weights}
    assert contents.bytes == sum(contents.bytes_by_dtype.values())
    assert (contents.shards, contents.tensors) == (2, len(model.tensors))


@pytest.mark.parametrize("layout", ["ct-block", "deepseek"])
def test_consistent_blocks_of_64_are_fine(tmp_path: Path, layout: str) -> None:
    model = Model(tmp_path, layout, block=64)
    if layout == "deepseek":
        model.quantization["weight_block_size"] = [64, 64]
    else:
        weights = model.quantization["config_groups"]["group_0"]["weights"]
        weights["block_structure"] = [64, 64]
    found = inspect_directory(model.write())
    assert (found.findings, found.block) == ((), (64, 64))


def test_a_weight_that_is_no_multiple_of_the_block_has_rounded_up_scales(model: Model) -> None:
    name = "model.layers.0.mlp.down_proj"
    model.tensors |= linear(name, HIDDEN, 520, "ct-block")
    assert model.tensors[f"{name}.weight_scale"] == ("BF16", (2, 5))
    assert inspect_directory(model.write()).findings == ()


def test_the_old_spelling_of_a_block_is_read(model: Model) -> None:
    weights = model.quantization["config_groups"]["group_0"]["weights"]
    weights["block_structure"] = "128x128"
    assert inspect_directory(model.write()).findings == ()


def test_one_file_without_an_index_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    content = shard_bytes(entries_of(llama_tensors("none")))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert inspect_directory(tmp_path).findings == ()


def test_only_headers_are_read(tmp_path: Path) -> None:
    """A sparse shard of 5 GB costs its header."""
    tensors = llama_tensors("none") | {"lm_head.weight": ("BF16", (5_000_000, 512))}
    content = shard_bytes(entries_of(tensors), data=0)
    size = max(e["data_offsets"][1] for n, e in entries_of(tensors).items() if n[0] != "_")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(content)
    os.truncate(shard, len(content) + size)
    assert size > 5_000_000_000
    before = bytes_read()
    assert inspect_directory(tmp_path).findings == ()
    assert bytes_read() - before < 1_000_000


def bytes_read() -> int:
    """What this process has read so far, of files and pipes."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


# --- files that are not what they should be ------------------------------------------------------


def test_a_shard_128_bytes_short_is_truncated(model: Model) -> None:
    shard = model.write() / model.shard(2).name
    os.truncate(shard, shard.stat().st_size - 128)
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity, finding.file) == ("truncated", "error", shard.name)
    assert "128 bytes before the end" in finding.message


def test_trailing_bytes_are_counted(model: Model) -> None:
    shard = model.write() / model.shard(1).name
    shard.write_bytes(shard.read_bytes() + bytes(64))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.file) == ("trailing-bytes", shard.name)
    assert "64 bytes" in finding.message


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", "empty", "an empty file"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "html", "an HTML page"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
            "lfs-pointer",
            "a Git LFS pointer",
        ),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header-too-long", "1152921504606846976 bytes"),
        ((4096).to_bytes(8, "little") + b'{"a"', "truncated", "its header alone"),
        ((8).to_bytes(8, "little") + b"{nothing", "header-not-json", "not JSON"),
        ((8).to_bytes(8, "little") + b"nonsense", "header-not-json", "'{'"),
        (b"abc", "truncated", "3 bytes"),
        (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "html", "an XML page"),
        (b'<?xml version="1.0"?>\n<!-- x -->\n<HTML><body>404', "html", "an HTML page"),
        (b"<!-- sorry --><html><body>404</body></html>", "html", "an HTML page"),
        (b'<?xml version="1', "html", "an XML page"),
        (b'{"error": "not found"}', "text", """begins '{"error": "not found"}'"""),
        (b"404 page not found\n", "text", "begins '404 page not found'"),
        ("文件不存在".encode() * 20, "text", "begins '文件不存在"),
    ],
)
def test_a_shard_that_is_something_else_is_named_for_what_it_is(
    model: Model, content: bytes, code: str, says: str
) -> None:
    model.write()
    model.shard(1).write_bytes(content)
    finding = errors(inspect_directory(model.directory))[0]
    assert (finding.code, finding.file) == (code, model.shard(1).name)
    assert says in finding.message


@pytest.mark.parametrize("content", [b"", b"<html>", b"version https://git-lfs", b"hello world"])
def test_what_an_unreadable_shard_holds_is_not_found_missing_again(
    model: Model, content: bytes
) -> None:
    model.write()
    model.shard(1).write_bytes(content)
    found = inspect_directory(model.directory)
    assert [(f.file, f.severity) for f in found.findings] == [(model.shard(1).name, "error")]


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda e: e[B].update(data_offsets=[40, 56]), "hole", "8 bytes behind"),
        (lambda e: e[B].update(data_offsets=[24, 40]), "overlap", "8 bytes inside"),
        (lambda e: e[B].update(shape=[3, 2]), "tensor-size", "BF16 [3, 2] takes 12"),
        (lambda e: e[B].update(dtype="F24"), "dtype-unknown", "F24"),
        (lambda e: e[B].pop("shape"), "header-bad-entry", B),
        (lambda e: e[B].update(shape=[-1]), "header-bad-entry", B),
    ],
)
def test_a_header_must_cover_its_file_exactly(
    tmp_path: Path, change: Any, code: str, says: str
) -> None:
    entries = entries_of({A: ("BF16", (4, 4)), B: ("BF16", (4, 2))})
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(entries))
    (tmp_path / "config.json").write_text(BARE)
    assert inspect_directory(tmp_path).findings == ()
    change(entries)
    shard = shard_bytes(entries, data=max(e["data_offsets"][1] for e in (entries[A], entries[B])))
    (tmp_path / "model.safetensors").write_bytes(shard)
    finding = only(inspect_directory(tmp_path))
    assert finding.code == code
    assert says in finding.message


def test_a_name_twice_in_a_header_is_found(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8"}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    (tmp_path / "config.json").write_text(BARE)
    finding = only(inspect_directory(tmp_path))
    assert (finding.code, "'a' twice" in finding.message) == ("header-duplicate", True)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "not-json"),
        ("[]", "not-json"),
        ("<html>", "html"),
        ("", "empty"),
        ("version https://git-lfs.github.com/spec/v1", "lfs-pointer"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_config_and_index_must_be_json(model: Model, name: str, content: str, code: str) -> None:
    (model.write() / name).write_text(content)
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.file) == (code, name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(LLAMA).encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf" + json.dumps(LLAMA).encode(), "BOM"),
        (b"\xff", "utf-8"),
        (b"[" * 200_000, "nested deeper than 100"),
        (b'{"a": ' + b"[" * 600 + b"]" * 600 + b"}", "nested deeper than 100"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": ' + b"9" * 101 + b"}", "101 digits"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_beyond_its_bounds_is_one_finding(
    model: Model, name: str, content: bytes, says: str
) -> None:
    (model.write() / name).write_bytes(content)
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity, finding.file) == ("not-json", "error", name)
    assert says in finding.message


def test_a_json_file_of_absurd_length_is_not_read(model: Model) -> None:
    os.truncate(model.write() / "config.json", 100_000_001)
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.file) == ("unreadable", "config.json")
    assert "more than 100000000 bytes" in finding.message


def test_infinity_in_a_config_is_a_number_as_it_is_to_the_engine(model: Model) -> None:
    model.config["time_step_limit"] = [0.0, float("inf")]
    assert inspect_directory(model.write()).findings == ()


def test_a_key_that_stands_twice_in_a_config_is_told(model: Model) -> None:
    path = model.write() / "config.json"
    path.write_text('{"hidden_size": 7, ' + path.read_text()[1:])
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == ("key-twice", "warning")
    assert "'hidden_size' twice" in finding.message


NOT_FILES = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_what_is_no_regular_file_is_not_waited_for(model: Model, name: str, kind: str) -> None:
    path = model.write() / name
    path.unlink()
    NOT_FILES[kind](path)
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.file) == ("unreadable", name)


def test_a_link_to_nothing_is_a_missing_config(model: Model) -> None:
    path = model.write() / "config.json"
    path.unlink()
    path.symlink_to("nothing")
    assert only(inspect_directory(model.directory)).code == "config-missing"


def test_a_missing_config_is_an_error(model: Model) -> None:
    (model.write() / "config.json").unlink()
    found = inspect_directory(model.directory)
    assert only(found).code == "config-missing"
    assert (found.architecture, found.quantization) == (None, None)


def test_a_directory_without_weights_has_none(model: Model) -> None:
    model.write()
    for path in model.directory.glob("model*"):
        path.unlink()
    (model.directory / "pytorch_model.bin").touch()
    assert only(inspect_directory(model.directory)).code == "no-weights"


@pytest.mark.parametrize("made", [True, False])
def test_what_is_not_a_model_directory_is_a_wrong_input(tmp_path: Path, made: bool) -> None:
    directory = tmp_path / "x"
    if made:
        directory.mkdir()
        (directory / "README.md").touch()
    with pytest.raises(OperatorError, match=str(directory)) as caught:
        inspect_directory(directory)
    assert caught.value.exit_code == 2


def test_shards_without_a_tensor_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(shard_bytes({}))
    finding = only(inspect_directory(tmp_path))
    assert (finding.code, finding.severity) == ("no-tensors", "error")


def test_tensors_of_no_layer_at_all_are_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    content = shard_bytes(entries_of({"a": ("U8", (1,))}))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert only(inspect_directory(tmp_path)).code == "layer-missing"


def write_header(model: Model, text: bytes, data: bytes = b"") -> None:
    """Write the model as one shard with that header."""
    model.directory.mkdir()
    (model.directory / "config.json").write_text(BARE)
    content = len(text).to_bytes(8, "little") + text + data
    (model.directory / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("entry", "code", "says"),
    [
        (b'{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}' % (b"9" * 400), "not-json", "digits"),
        (b'{"dtype":"U8","shape":[1],"data_offsets":[0,%s]}' % (b"9" * 400), "not-json", "digits"),
        (b'{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}' % (b"9" * 5000), "not-json", "digits"),
        (b'{"dtype":"U8","shape":[1],"data_offsets":[0,%s]}' % (b"9" * 30), "bad-entry", A),
        (b'{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}' % (b"9" * 30), "bad-entry", A),
        (
            b'{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,1]}',
            "bad-entry",
            A,
        ),
        (b'{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}', "not-json", "NaN"),
        (b'{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}', "not-json", "1e999"),
        (b"[" * 90 + b"]" * 90, "bad-entry", A),
        (b"[" * 986 + b"]" * 986, "not-json", "nested deeper"),
        (b"[" * 100_000, "not-json", "nested deeper"),
    ],
)
def test_a_header_beyond_its_bounds_is_one_finding(
    model: Model, entry: bytes, code: str, says: str
) -> None:
    write_header(model, b'{"%s":%s}' % (A.encode(), entry), b"x")
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == (f"header-{code}", "error")
    assert says in finding.message


def test_a_tensor_may_end_within_no_byte(model: Model) -> None:
    entry = b'{"dtype":"F4","shape":[3],"data_offsets":[0,2]}'
    write_header(model, b'{"%s":%s}' % (A.encode(), entry), b"xx")
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.tensor) == ("tensor-size", A)


def test_a_layer_of_absurd_number_is_no_layer(model: Model) -> None:
    name = b"model.layers.%s.weight" % (b"9" * 5000)
    write_header(model, b'{"%s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' % name, b"x")
    assert inspect_directory(model.directory).architecture is not None


# --- index and shards ----------------------------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_shard_is_named_with_and_without_an_index(
    model: Model, indexed: bool, number: int
) -> None:
    model.indexed = indexed
    model.write()
    model.shard(number).unlink()
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == ("shard-missing", "error")
    assert finding.file == model.shard(number).name


@pytest.mark.parametrize("total", ["9999999", "99999999999", "9" * 200])
def test_of_any_number_of_missing_shards_some_are_named(model: Model, total: str) -> None:
    model.indexed = False
    model.write()
    model.shard(2).unlink()
    model.shard(1).rename(model.directory / f"model-1-of-{total}.safetensors")
    found = errors(inspect_directory(model.directory))
    assert {finding.code for finding in found} == {"shard-missing"}
    assert len(found) == 21
    assert f"{int(total) - 21} more shards" in found[0].message
    second = f"model-{2:0{len(total)}}-of-{total}.safetensors"
    assert second in [finding.file for finding in found]


def test_a_missing_layer_is_found_where_neither_index_nor_numbers_tell(model: Model) -> None:
    model.indexed = False
    model.write()
    model.shard(1).rename(model.directory / "model.safetensors")
    model.shard(2).unlink()
    finding = only(inspect_directory(model.directory))
    assert finding.code == "layer-missing"
    assert "2 layers, 1 of them are in no shard: 1" in finding.message


def rewrite_index(model: Model, change: Any) -> None:
    """Change the weight_map of a written model."""
    index = json.loads(model.index.read_text())
    change(index["weight_map"])
    model.index.write_text(json.dumps(index))


def test_a_tensor_that_only_the_index_has_is_missing(model: Model) -> None:
    model.write()
    rewrite_index(model, lambda m: m.update(ghost=model.shard(1).name))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity, finding.tensor) == ("tensor-missing", "error", "ghost")


def test_a_tensor_that_the_index_does_not_have_is_extra(model: Model) -> None:
    model.write()
    rewrite_index(model, lambda m: m.pop("lm_head.weight"))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == ("tensor-extra", "warning")
    assert finding.tensor == "lm_head.weight"


def test_a_tensor_in_another_shard_than_the_index_says_is_told(model: Model) -> None:
    model.write()
    rewrite_index(model, lambda m: m.update({"lm_head.weight": model.shard(1).name}))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == ("tensor-misplaced", "warning")


def test_a_tensor_in_two_shards_is_a_duplicate(model: Model) -> None:
    model.write()
    second = model.parts()[1] | {"model.embed_tokens.weight": ("BF16", (384, HIDDEN))}
    model.shard(2).write_bytes(shard_bytes(entries_of(second)))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity) == ("tensor-duplicate", "error")
    assert finding.tensor == "model.embed_tokens.weight"
    assert model.shard(1).name in finding.message


def test_a_shard_that_the_index_does_not_name_is_not_loaded(model: Model) -> None:
    extra = model.write() / "adapter.safetensors"
    extra.write_bytes(shard_bytes(entries_of({"x": ("U8", (1,))})))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.file) == ("shard-unlisted", extra.name)
    assert finding.severity == "warning"


def test_an_index_without_a_map_is_told(model: Model) -> None:
    model.write()
    model.index.write_text("{}")
    assert only(inspect_directory(model.directory)).code == "index-empty"


def test_an_index_that_names_no_file_for_a_tensor_is_told(model: Model) -> None:
    model.write()
    rewrite_index(model, lambda m: m.update(ghost=None))
    finding = only(inspect_directory(model.directory))
    assert (finding.code, finding.severity, finding.tensor) == ("index-entry", "error", "ghost")


# --- quantization --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "none"])
def test_a_config_without_quantization_beside_quantized_weights_is_an_error(
    tmp_path: Path, layout: str
) -> None:
    model = Model(tmp_path, layout)
    del model.config["quantization_config"]
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.file) == ("quantization-missing", "config.json")
    assert f"{7 * LAYERS} weights" in finding.message


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "none"])
def test_a_config_with_quantization_beside_plain_weights_is_an_error(
    tmp_path: Path, layout: str
) -> None:
    model = Model(tmp_path, layout)
    model.tensors = llama_tensors("none")
    assert only(inspect_directory(model.write())).code == "quantization-unused"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "none"])
def test_missing_scales_are_an_error_a_shard(tmp_path: Path, layout: str) -> None:
    model = Model(tmp_path, layout)
    model.tensors = {n: s for n, s in model.tensors.items() if "weight_scale" not in n}
    found = inspect_directory(model.write())
    assert [(f.code, f.severity, f.count) for f in found.findings] == [
        ("scale-missing", "error", 7)
    ] * 2
    assert "weight_scale" in found.findings[0].message


def test_one_missing_scale_is_named(model: Model) -> None:
    del model.tensors[f"{Q_PROJ}.weight_scale"]
    finding = only(inspect_directory(model.write()))
    assert (finding.tensor, finding.count) == (f"{Q_PROJ}.weight", 1)
    assert f"{Q_PROJ}.weight_scale is in no shard" in finding.message


def test_a_scale_without_its_weight_is_an_error(model: Model) -> None:
    del model.tensors[f"{Q_PROJ}.weight"]
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.tensor) == ("weight-missing", f"{Q_PROJ}.weight_scale")


@pytest.mark.parametrize("layout", ["ct-block", "deepseek"])
def test_scales_of_64_blocks_under_a_config_of_128_are_named(tmp_path: Path, layout: str) -> None:
    found = inspect_directory(Model(tmp_path, layout, block=64).write())
    assert codes(found) == ["block-size"] * 2
    assert "64 x 64 blocks; config.json says 128 x 128" in found.findings[0].message
    assert not found.whole


def test_the_guides_configuration_is_named_for_what_it_is(model: Model) -> None:
    model.config["quantization_config"] = {"quant_method": "fp8", "block_size": 128}
    found = inspect_directory(model.write())
    messages = [f.message for f in found.findings if f.code == "quantization-config"]
    assert any("block_size = 128 is a key that vLLM ignores" in message for message in messages)
    assert any("activation_scheme" in message for message in messages)
    shape = next(f for f in found.findings if f.code == "scale-shape")
    assert "128 x 128 blocks" in shape.message
    assert "weight_block_size" in next(f.remedy for f in found.findings if "ignores" in f.message)
    assert not found.whole


@pytest.mark.parametrize(("layout", "config"), [("ct-block", "deepseek"), ("deepseek", "ct-block")])
def test_a_config_of_the_other_block_layout_is_named(
    tmp_path: Path, layout: str, config: str
) -> None:
    model = Model(tmp_path, layout)
    model.config["quantization_config"] = QUANTIZATIONS[config]
    found = inspect_directory(model.write())
    assert codes(found) == ["scale-name"] * 2
    assert "weight_scale_inv" in found.findings[0].message


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("ct-channel", (256,)), ("int8", (256,)), ("ct-tensor-static", ()), ("fp8-tensor", (1,))],
)
def test_scales_have_two_right_shapes(tmp_path: Path, layout: str, shape: tuple[int, ...]) -> None:
    model = Model(tmp_path, layout)
    model.tensors[f"{Q_PROJ}.weight_scale"] = ("F32", shape)
    assert inspect_directory(model.write()).findings == ()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "none"])
def test_a_scale_of_a_wrong_shape_is_an_error(tmp_path: Path, layout: str) -> None:
    model = Model(tmp_path, layout)
    ending = "weight_scale_inv" if layout == "deepseek" else "weight_scale"
    model.tensors[f"{Q_PROJ}.{ending}"] = ("F32", (7,))
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.tensor) == ("scale-shape", f"{Q_PROJ}.{ending}")
    assert "[7]" in finding.message


def test_a_scale_of_whole_numbers_is_an_error(model: Model) -> None:
    model.tensors[f"{Q_PROJ}.weight_scale"] = ("I8", (2, 2))
    assert only(inspect_directory(model.write())).code == "scale-dtype"


def test_static_activations_need_their_scales(tmp_path: Path) -> None:
    model = Model(tmp_path, "ct-tensor-static")
    del model.tensors[f"{Q_PROJ}.input_scale"]
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.tensor) == ("input-scale-missing", f"{Q_PROJ}.weight")


@pytest.mark.parametrize(
    ("layout", "dtype"), [("ct-block", "I8"), ("int8", "F8_E4M3"), ("deepseek", "F8_E5M2")]
)
def test_weights_of_another_type_than_the_config_says_are_an_error(
    tmp_path: Path, layout: str, dtype: str
) -> None:
    model = Model(tmp_path, layout)
    model.tensors[f"{Q_PROJ}.weight"] = (dtype, (256, HIDDEN))
    finding = only(inspect_directory(model.write()))
    assert finding.code == "weight-dtype"
    assert f"is {dtype}" in finding.message


def test_a_quantized_weight_that_the_config_leaves_out_is_an_error(model: Model) -> None:
    model.quantization["ignore"].append("re:.*layers\\.0\\.self_attn.*")
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.count) == ("ignored-but-quantized", 4)


def test_a_quantized_weight_that_no_group_targets_is_an_error(model: Model) -> None:
    model.quantization["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    found = inspect_directory(model.write())
    assert [(f.code, f.count) for f in found.findings] == [("not-targeted", 4)] * 2


def test_parts_of_a_fused_layer_are_quantized_alike(model: Model) -> None:
    key = Q_PROJ.replace("q_proj", "k_proj")
    del model.tensors[f"{key}.weight_scale"]
    model.tensors[f"{key}.weight"] = ("BF16", (128, HIDDEN))
    model.quantization["ignore"].append(key)
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.tensor) == ("fused-mixed", f"{Q_PROJ}.weight")


@pytest.mark.parametrize(
    ("ignore", "found"),
    [([], ["not-quantized"]), (["model.layers.0.mlp.down_proj"], []), (["re:.*down_proj"], [])],
)
def test_a_plain_weight_is_listed_as_one(model: Model, ignore: list[str], found: list[str]) -> None:
    name = "model.layers.0.mlp.down_proj"
    del model.tensors[f"{name}.weight_scale"]
    model.tensors[f"{name}.weight"] = ("BF16", (HIDDEN, 512))
    model.quantization["ignore"] = ignore
    for other in ("model.layers.1.mlp.down_proj",) if "re:.*down_proj" in ignore else ():
        del model.tensors[f"{other}.weight_scale"]
        model.tensors[f"{other}.weight"] = ("BF16", (HIDDEN, 512))
    assert codes(inspect_directory(model.write())) == found


@pytest.mark.parametrize(
    "part", [{"quant_method": "awq"}, {"quant_method": "bitsandbytes", "load_in_8bit": True}]
)
def test_other_methods_are_told_as_unchecked(model: Model, part: dict[str, Any]) -> None:
    model.config["quantization_config"] = part
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-unchecked", "info")


UNSCALED = {n: s for n, s in llama_tensors("ct-block").items() if "scale" not in n}


def group(**weights: Any) -> dict[str, Any]:
    """A quantization_config with one group, of quantized weights as ``weights`` says."""
    made = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": made}}


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"quant_method": "compressed-tensors"}, "quantization-config"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "quantization-config"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "quantization-config"),
        ({"config_groups": {"g": None}}, "quantization-config"),
        ({"config_groups": {"g": {"targets": ["Linear"]}}}, "quantization-config"),
        ({"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "quantization-config"),
        (group(num_bits=[8]), "quantization-config"),
        (group(num_bits="eight"), "quantization-config"),
        (group(type=["float"]), "quantization-config"),
        (group(type="floats"), "quantization-config"),
        (group(strategy=5), "quantization-config"),
        ({"quant_method": None, "activation_scheme": "dynamic"}, "quantization-config"),
        ({"quant_method": ["fp8"]}, "quantization-config"),
        ({"quant_method": "fp8", "activation_scheme": ["dynamic"]}, "quantization-config"),
        ("fp8", "quantization-config"),
        (["fp8"], "quantization-config"),
        # compressed-tensors reads these, so they are checked
        (group(num_bits="8"), "scale-missing"),
        (group(type="FLOAT"), "scale-missing"),
        (group(strategy="CHANNEL"), "scale-missing"),
        (group(group_size=-1), "scale-missing"),
        # what is not known here has scales all the same
        (group(strategy="group", group_size=32), "scale-missing"),
        ({"quant_method": "fp9"}, "scale-missing"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "scale-missing"),
    ],
)
def test_quantized_weights_without_scales_never_pass(model: Model, part: Any, code: str) -> None:
    model.tensors = UNSCALED
    model.config["quantization_config"] = part
    found = inspect_directory(model.write())
    assert code in {finding.code for finding in errors(found)}


def test_groups_of_weights_are_told_as_unchecked(model: Model) -> None:
    model.config["quantization_config"] = group(strategy="group", group_size=128)
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-unchecked", "info")


def test_packed_weights_have_scales_without_a_weight(model: Model) -> None:
    """A group of 4 bits beside one of 8, as llm-compressor writes NVFP4."""
    name = "model.layers.0.mlp.down_proj"
    del model.tensors[f"{name}.weight"]
    model.tensors[f"{name}.weight_packed"] = ("U8", (HIDDEN, 256))
    model.tensors[f"{name}.weight_scale"] = ("F8_E4M3", (HIDDEN, 32))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    model.quantization["config_groups"]["nvfp4"] = {"targets": [f"re:.*{name}"], "weights": weights}
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-unchecked", "info")


def test_packed_weights_alone_are_told_as_unchecked(tmp_path: Path) -> None:
    """INT4, as quantized.w4a16 models have it."""
    model = Model(tmp_path, "none")
    for name, (_, shape) in dict(model.tensors).items():
        if "proj" in name:
            del model.tensors[name]
            model.tensors[f"{name}_packed"] = ("F32", (shape[0], shape[1] // 8))
            model.tensors[f"{name}_scale"] = ("BF16", (shape[0], shape[1] // 128))
    part = group(num_bits=4, type="int", strategy="group", group_size=128)
    model.config["quantization_config"] = {
        **part,
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-unchecked", "info")


@pytest.mark.parametrize("key", ["ignore", "targets"])
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("re:(", "unterminated"),
        ("re:a{99999999999999}", "OverflowError"),
        ("re:" + "(" * 3000 + ")" * 3000, "RecursionError"),
    ],
)
def test_a_pattern_that_is_no_regular_expression_is_named(
    model: Model, key: str, pattern: str, says: str
) -> None:
    holder = model.quantization
    if key == "targets":
        holder = holder["config_groups"]["group_0"]
    holder[key].append(pattern)
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-config", "error")
    assert says in finding.message


def test_a_pattern_that_never_ends_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    model.quantization["ignore"] += ["re:.*gate$", "re:(.+)+z", "re:.*router"]
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-config", "error")
    assert "'re:(.+)+z' cannot be matched" in finding.message
    assert "more than 1 s" in finding.message


@pytest.mark.parametrize("value", [[None, 1, {}], "lm_head", {"a": 1}])
def test_a_list_of_what_is_not_quantized_holds_names(model: Model, value: Any) -> None:
    model.quantization["ignore"] = value
    assert "quantization-config" in {f.code for f in errors(inspect_directory(model.write()))}


def test_modelopts_file_of_its_own_is_read(model: Model) -> None:
    del model.config["quantization_config"]
    path = model.write() / "hf_quant_config.json"
    path.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}')
    found = inspect_directory(model.directory)
    assert found.quantization == "modelopt-fp8"
    assert codes(found) == ["quantization-unchecked"]


def test_ascends_file_of_its_own_is_read(tmp_path: Path) -> None:
    model = Model(tmp_path, "int8")
    del model.config["quantization_config"]
    (model.write() / "quant_model_description.json").write_text("{}")
    found = inspect_directory(tmp_path)
    assert (found.quantization, codes(found)) == ("ascend", ["quantization-unchecked"])


@pytest.mark.parametrize(
    "value",
    [[128], 128, "128", [128, 0], [128, "128"], [True, True], [128.0, 128.0], "9" * 4400 + "x1"],
)
def test_a_block_size_that_is_no_pair_is_refused(tmp_path: Path, value: Any) -> None:
    model = Model(tmp_path, "deepseek")
    model.quantization["weight_block_size"] = value
    assert "quantization-config" in codes(inspect_directory(model.write()))


def test_a_block_strategy_without_blocks_is_refused(model: Model) -> None:
    del model.quantization["config_groups"]["group_0"]["weights"]["block_structure"]
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("quantization-config", "error")


def test_experts_have_a_scale_each(tmp_path: Path) -> None:
    model = Model(tmp_path, "deepseek")
    for expert in range(3):
        for own, rows, columns in (("gate_proj", 128, 256), ("down_proj", 256, 128)):
            name = f"model.layers.1.mlp.experts.{expert}.{own}"
            model.tensors |= linear(name, rows, columns, "deepseek")
    model.tensors["model.layers.0.mlp.experts.gate_up_proj"] = ("F8_E4M3", (3, 256, 200))
    model.tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = ("F32", (3, 2, 2))
    assert inspect_directory(model.write()).findings == ()
    del model.tensors["model.layers.1.mlp.experts.2.down_proj.weight_scale_inv"]
    del model.tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"]
    found = inspect_directory(model.write())
    assert [(f.code, f.count) for f in found.findings] == [("scale-missing", 1)] * 2


# --- config.json and shards ----------------------------------------------------------------------


def test_heads_that_the_keys_do_not_have_are_told(model: Model) -> None:
    """The guide's head_dim of 248 is not the model's."""
    model.config["head_dim"] = 248
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.count) == ("config-heads", LAYERS)
    assert f"has shape [{2 * HEAD_DIM}, {HIDDEN}]" in finding.message
    assert "496 rows" in finding.message


def test_a_config_without_architectures_is_told(model: Model) -> None:
    del model.config["architectures"]
    assert only(inspect_directory(model.write())).code == "no-architecture"


@pytest.mark.parametrize("value", [None, -1, 0, 1.0, "2", True, [], 10**9, 10**30])
def test_layers_that_cannot_be_are_an_error(model: Model, value: Any) -> None:
    model.config["num_hidden_layers"] = value
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("config-value", "error")
    assert "num_hidden_layers is" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"vocab_size": 10**20},
        {"num_attention_heads": 10**20},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["x"]]},
        {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
        {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}},
        {"rope_parameters": {"rope_type": "linear", "factor": -2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e300}},
        {"rope_parameters": {"rope_type": ["yarn"], "factor": 2}},
        {"rope_parameters": {"rope_type": {}, "factor": 2}},
        {"rope_parameters": {"full_attention": {"rope_theta": float("nan")}}},
        {"rope_parameters": None, "rope_theta": float("nan")},
        {"rope_parameters": None, "rope_scaling": [1, 2]},
        {"per_layer_config": {"1": {"head_dim": 10**20}}},
    ],
)
def test_values_with_which_no_engine_answers_rightly_are_an_error(
    model: Model, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model.config |= changes
    assert "config-value" in {f.code for f in errors(inspect_directory(model.write()))}
    code, out, _ = run(capsys, model.directory, "--json")
    json.loads(out, parse_constant=pytest.fail)
    assert code == 1


def test_a_context_beyond_all_bounds_is_left_to_max_model_len(model: Model) -> None:
    model.config["max_position_embeddings"] = 10**30
    found = inspect_directory(model.write())
    assert (only(found).code, only(found).severity) == ("config-value", "warning")
    assert found.architecture is not None
    assert found.architecture.context is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": None, "intermediate_size": None},
        {"intermediate_size": [512, 512]},
        {"sliding_window": -1, "num_experts": 0},
        {"sliding_window_pattern": "LLLG"},
        {"rope_parameters": {"rope_theta": [1e4, 1e6], "mrope_section": [16, 24, 24]}},
        {"layer_types": [1, {}]},
    ],
)
def test_spellings_of_other_classes_are_no_finding(model: Model, changes: dict[str, Any]) -> None:
    model.config |= changes
    assert inspect_directory(model.write()).findings == ()


def test_a_config_that_only_names_its_class_is_an_error(model: Model) -> None:
    model.config = {"architectures": ["LlamaForCausalLM"]}
    model.tensors = llama_tensors("none")
    found = inspect_directory(model.write())
    assert codes(found) == ["no-model-type", "config-incomplete", "config-incomplete"]
    assert not found.whole


def test_layers_that_the_class_knows_are_only_told(tmp_path: Path) -> None:
    """llava-hf/llava-1.5-7b-hf leaves its language model's layers to LlamaConfig."""
    model = Model(tmp_path, "none")
    text = {"model_type": "llama", "vocab_size": 32064}
    model.config = {"architectures": ["X"], "model_type": "llava", "text_config": text}
    found = inspect_directory(model.write())
    assert codes(found) == ["config-incomplete", "config-incomplete"]  # layers, heads
    assert found.whole


@pytest.mark.parametrize("value", [None, "32", [32], -1])
def test_attention_without_heads_is_told_with_what_to_do(tmp_path: Path, value: object) -> None:
    model = Model(tmp_path, "none")
    model.config["num_attention_heads"] = value
    finding = only(inspect_directory(model.write()))
    assert (finding.code, finding.severity) == ("config-incomplete", "warning")
    assert "num_attention_heads is missing or no number" in finding.message
    assert finding.remedy == "take config.json from the checkpoint's publisher"


def test_heads_in_an_older_spelling_are_read(tmp_path: Path) -> None:
    model = Model(tmp_path, "none")
    model.config["n_head"] = model.config.pop("num_attention_heads")
    assert inspect_directory(model.write()).findings == ()


def test_keys_without_rows_are_told(tmp_path: Path) -> None:
    model = Model(tmp_path, "none")
    model.tensors["model.layers.0.self_attn.k_proj.weight"] = ("F32", ())
    finding = only(inspect_directory(model.write()))
    assert (finding.code, "has shape []" in finding.message) == ("config-heads", True)


@pytest.mark.parametrize("value", [None, "x", -1, 0, [], {}, True, 1.5])
@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "num_attention_heads", "rope_parameters", "head_dim", "layer_types"],
)
def test_nonsense_in_a_config_is_no_traceback(model: Model, key: str, value: Any) -> None:
    model.config[key] = value
    inspect_directory(model.write())


# --- stored headers ------------------------------------------------------------------------------


def stored_of(model: Model) -> dict[str, Header]:
    """The headers of a written model."""
    return {shard.name: read_header(shard) for shard in map(model.shard, (1, 2))}


def test_the_stored_headers_of_the_same_files_agree(model: Model) -> None:
    model.write()
    assert inspect_directory(model.directory, stored_of(model)).findings == ()


def test_another_shape_than_the_stored_is_named(model: Model) -> None:
    model.write()
    stored = stored_of(model)
    model.tensors["lm_head.weight"] = ("BF16", (385, HIDDEN))
    found = inspect_directory(model.write(), stored)
    finding = only(found)
    assert (finding.code, finding.tensor) == ("header-differs", "lm_head.weight")
    assert "[385, 256]" in finding.message
    assert "[384, 256]" in finding.message


def test_missing_and_extra_tensors_and_shards_of_the_stored_are_named(model: Model) -> None:
    model.write()
    stored = stored_of(model)
    first = stored.pop(model.shard(1).name)
    stored["other.safetensors"] = first
    del model.tensors["lm_head.weight"]
    model.tensors["model.layers.1.new"] = ("BF16", (1,))
    found = inspect_directory(model.write(), stored)
    assert {(f.code, f.file, f.tensor) for f in found.findings} == {
        ("shard-unknown", model.shard(1).name, None),
        ("shard-missing", "other.safetensors", None),
        ("tensor-missing", model.shard(2).name, "lm_head.weight"),
        ("header-differs", model.shard(2).name, "model.layers.1.new"),
    }


def test_a_checkpoint_is_known_by_its_stored_parts_alone(model: Model) -> None:
    here = inspect_directory(model.write())
    assert inspect_known(model.config, stored_of(model)) == here


# --- tensor parallel -----------------------------------------------------------------------------


def headers_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Header]:
    """Headers of one shard that need no file."""
    return {"model.safetensors": header_of_entries(entries_of(tensors), "x")}


def test_gemma_4_31b_is_split_among_1_2_4_or_8_but_not_16() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**GEMMA_4_31B, "layer_types": kinds},
        "quantization_config": QUANTIZATIONS["ct-block"],
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, kind in enumerate(kinds):
        prefix = f"model.language_model.layers.{number}"
        kv_heads, dim = (16, 256) if kind == "sliding_attention" else (4, 512)
        tensors |= linear(f"{prefix}.self_attn.q_proj", 32 * dim, 5376, "ct-block")
        tensors |= linear(f"{prefix}.self_attn.k_proj", kv_heads * dim, 5376, "ct-block")
        if kind == "sliding_attention":
            tensors |= linear(f"{prefix}.self_attn.v_proj", kv_heads * dim, 5376, "ct-block")
        tensors |= linear(f"{prefix}.self_attn.o_proj", 5376, 32 * dim, "ct-block")
        for own in ("gate_proj", "up_proj"):
            tensors |= linear(f"{prefix}.mlp.{own}", 21504, 5376, "ct-block")
        tensors |= linear(f"{prefix}.mlp.down_proj", 5376, 21504, "ct-block")
        tower = f"model.vision_tower.encoder.layers.{number}.self_attn.q_proj.weight"
        tensors[tower] = ("BF16", (1150, 1150))
    found = inspect_known(config, headers_of(tensors))
    assert found.findings == ()
    assert found.tensor_parallel.sizes == (1, 2, 4, 8)
    assert "1344 of 21504 a GPU are no whole blocks of 128" in found.tensor_parallel.refused[16]


@pytest.mark.parametrize(
    ("layout", "kv_heads", "sizes"),
    [
        # FFN 2048: 16 GPUs get 128 rows each; a KV head is 128 rows and is repeated
        ("ct-block", 2, (1, 2, 4, 8, 16)),
        ("ct-block", 16, (1, 2, 4, 8, 16)),
        ("none", 2, (1, 2, 4, 8, 16)),
        ("none", 3, (1,)),
    ],
)
def test_few_kv_heads_are_repeated(layout: str, kv_heads: int, sizes: tuple[int, ...]) -> None:
    config = {
        **LLAMA,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "quantization_config": QUANTIZATIONS[layout],
    }
    prefix = "model.layers.0"
    tensors = linear(f"{prefix}.self_attn.q_proj", 16 * 128, 512, layout)
    tensors |= linear(f"{prefix}.self_attn.k_proj", kv_heads * 128, 512, layout)
    tensors |= linear(f"{prefix}.mlp.down_proj", 512, 2048, layout)
    found = inspect_known(config, headers_of(tensors))
    assert found.tensor_parallel.sizes == sizes


def test_without_headers_no_size_is_promised() -> None:
    found = inspect_known(LLAMA, {})
    assert (found.tensor_parallel.sizes, found.tensor_parallel.refused) == ((), {})


GEMMA_4_31B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "vocab_size": 262144,
}


# --- the command ---------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``fp8fleet inspect ARGUMENTS``."""
    code = hostcli.main(["inspect", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_whole_model_is_summed_up(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, model.write())
    assert (code, err) == (0, "")
    for text in (
        "LlamaForCausalLM (bfloat16)",
        "2 x full_attention, 2 KV heads x 64",
        "rope_theta 500000.0",
        "compressed-tensors-fp8-block, blocks of 128 x 128",
        "72 in 14 tensors: 144 B",
        f"{model.directory}: whole",
    ):
        assert text in out


def test_errors_are_shown_with_their_remedies(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write()
    model.shard(2).unlink()
    code, out, _ = run(capsys, model.directory)
    assert code == 1
    (line,) = [line for line in out.splitlines() if "[shard-missing]" in line]
    assert line.startswith(f"error: {model.shard(2).name} is missing")
    assert "not to be served" in out.splitlines()[-1]


def test_the_json_has_what_a_program_needs(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, model.write(), "--json")
    report = json.loads(out)
    assert (code, report["whole"], report["findings"]) == (0, True, [])
    assert report["architecture"]["groups"][0]["kv_heads"] == 2
    assert report["block"] == [128, 128]
    assert report["contents"]["scales"] == 72
    assert report["tensor_parallel"]["sizes"] == [1]
    os.truncate(model.shard(1), 100)
    code, out, _ = run(capsys, model.directory, "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["code"]) == (1, "truncated")
    assert set(finding) >= {"severity", "file", "tensor", "message", "remedy"}


BAD_NAME = "layers.0.a\x1b[31m\nerror: fake\u2028\u202e\ud800"


@pytest.mark.parametrize("indexed", [True, False])
def test_no_name_in_a_checkpoint_forges_a_line(
    model: Model, indexed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every text of the files, in what is summed up and in findings."""
    entries = {BAD_NAME: {"dtype": BAD_NAME, "shape": [1], "data_offsets": [0, 4]}}
    rope = {"rope_type": BAD_NAME, BAD_NAME: BAD_NAME}
    model.config |= {"architectures": [BAD_NAME], "torch_dtype": BAD_NAME, "dtype": None}
    model.config |= {"quantization_config": {"quant_method": BAD_NAME}, "rope_parameters": rope}
    model.config |= {"layer_types": [BAD_NAME] * LAYERS, "num_attention_heads": BAD_NAME}
    model.write()
    model.shard(1).write_bytes(shard_bytes(entries))
    if indexed:
        rewrite_index(model, lambda m: m.update({BAD_NAME: BAD_NAME}))
    else:
        model.index.unlink()
    code, out, err = run(capsys, model.directory)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert not any(line.startswith("error: fake") for line in lines)
    assert all(line.isprintable() for line in lines)
    assert r"\x1b[31m\nerror: fake\u2028\u202e\ud800" in out
    code, out, _ = run(capsys, model.directory, "--json")
    assert (code, json.loads(out)["architecture"]["name"]) == (1, BAD_NAME)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"{", b'{"a\nerror: fake": 1}', b"\xff", b"[]"]
)
def test_stored_headers_that_are_none_are_a_wrong_input(
    model: Model, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = model.directory.parent / "headers.json"
    stored.write_bytes(content)
    code, out, err = run(capsys, model.write(), "--headers", stored)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {stored}: ")
    assert err.count("\n") == 1


def test_stored_headers_from_a_pipe_are_a_wrong_input(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = model.directory.parent / "headers.json"
    os.mkfifo(stored)
    model.write()
    for more in ([], ["--manifest", manifest_of(model)]):
        code, _, err = run(capsys, model.directory, "--headers", stored, *more)
        assert (code, "not a regular file" in err) == (2, True)


@pytest.mark.parametrize(("mode", "code"), [(0o444, 1), (0o111, 2)])
def test_a_directory_that_may_not_be_read_is_told(mode: int, code: int) -> None:
    """Without x its files cannot be opened, without r they cannot be listed."""
    program = (
        "import os, sys; from fp8fleet.hostcli import main;"
        "os.getuid() or os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        directory = Model(Path(name) / "model").write()
        directory.chmod(mode)
        command = [sys.executable, "-c", program, "inspect", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        directory.chmod(0o755)
    assert done.returncode == code, done.stderr
    assert "Permission denied" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_is_no_model_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path}: is not a model directory")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 1)])
def test_stored_headers_are_compared(
    model: Model, capsys: pytest.CaptureFixture[str], broken: bool, code: int
) -> None:
    model.write()
    stored = model.directory.parent / "headers.json"
    stored.write_text(headers_text(stored_of(model)))
    if broken:
        model.tensors["lm_head.weight"] = ("BF16", (385, HIDDEN))
        model.write()
    assert run(capsys, model.directory, "--headers", stored)[0] == code


def test_stored_headers_that_are_not_there_are_a_wrong_input(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, model.write(), "--headers", model.directory / "none.json")
    assert code == 2
    assert "none.json" in err


def manifest_of(model: Model, quantization: str = "compressed-tensors-fp8-block") -> Path:
    """A manifest of what the model directory holds now."""
    lines = ['name = "m"', 'revision = "1"', f'quantization = "{quantization}"']
    for path in sorted(model.directory.iterdir()):
        content = path.read_bytes()
        if path.name.startswith("."):
            continue
        lines += ["[[files]]", f'path = "{path.name}"', f"size = {len(content)}"]
        lines.append(f'sha256 = "{hashlib.sha256(content).hexdigest()}"')
    manifest = model.directory.parent / "manifest.toml"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


@pytest.fixture
def inspections(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose headers were read."""
    seen: list[Path] = []

    def noted(directory: Path, *rest: Any) -> Checkpoint:
        seen.append(directory)
        return inspect_directory(directory, *rest)

    monkeypatch.setattr(inspect_cli, "inspect_directory", noted)
    return seen


def test_a_pass_is_noted_and_the_next_check_reads_no_header(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    model.write()
    stored = model.directory.parent / "headers.json"
    stored.write_text(headers_text(stored_of(model)))
    arguments = (model.directory, "--manifest", manifest_of(model), "--headers", stored)
    assert run(capsys, *arguments)[0] == 0
    code, out, _ = run(capsys, *arguments)
    assert (code, out) == (0, f"{model.directory}: whole, as inspected before\n")
    assert len(inspections) == 1


def test_a_note_that_is_a_pipe_is_replaced(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    manifest = manifest_of_written(model)
    os.mkfifo(model.directory / INSPECTED)
    for _ in range(2):
        assert run(capsys, model.directory, "--manifest", manifest)[0] == 0
    assert len(inspections) == 1


def test_other_headers_another_manifest_or_other_rules_ask_for_a_new_inspection(
    model: Model,
    capsys: pytest.CaptureFixture[str],
    inspections: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model.write()
    manifest = manifest_of(model)
    stored = model.directory.parent / "headers.json"
    stored.write_text(headers_text(stored_of(model)))
    assert run(capsys, model.directory, "--manifest", manifest)[0] == 0
    arguments = (model.directory, "--manifest", manifest, "--headers", stored)
    assert run(capsys, *arguments)[0] == 0
    stored.write_text("{}")
    assert run(capsys, *arguments)[0] == 1
    stored.write_text(headers_text(stored_of(model)))
    manifest.write_text(manifest.read_text().replace('revision = "1"', 'revision = "2"'))
    assert run(capsys, *arguments)[0] == 0
    assert len(inspections) == 4
    monkeypatch.setattr(inspect_cli, "_RULES", (inspect_cli,))
    assert run(capsys, *arguments)[0] == 0
    assert len(inspections) == 5


def test_a_whole_download_of_a_broken_checkpoint_is_never_noted(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    """The publisher's files, each as the manifest says, and still not to be served."""
    model.tensors = {n: s for n, s in model.tensors.items() if "weight_scale" not in n}
    model.write()
    arguments = (model.directory, "--manifest", manifest_of(model))
    for _ in range(2):
        code, out, _err = run(capsys, *arguments)
        assert code == 1
        assert "[scale-missing]" in out
    assert len(inspections) == 2


def test_a_wrong_file_is_told_without_what_it_would_hold(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    manifest = manifest_of_written(model)
    os.truncate(model.shard(2), 5000)
    code, out, _ = run(capsys, model.directory, "--manifest", manifest)
    assert (code, inspections) == (1, [])
    assert f"{model.shard(2).name} has 5000 bytes" in out
    code, out, _ = run(capsys, model.directory, "--manifest", manifest, "--json")
    report = json.loads(out)
    assert (code, report["whole"]) == (1, False)
    assert [finding["code"] for finding in report["findings"]] == ["size"]


def manifest_of_written(model: Model) -> Path:
    """The manifest of a model that is written for it."""
    model.write()
    return manifest_of(model)


def test_a_changed_file_loses_the_pass(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    manifest = manifest_of_written(model)
    assert run(capsys, model.directory, "--manifest", manifest)[0] == 0
    content = bytearray(model.shard(1).read_bytes())
    content[-1] ^= 1
    model.shard(1).write_bytes(content)
    assert run(capsys, model.directory, "--manifest", manifest)[0] == 1


def test_beside_files_of_others_nothing_is_noted(
    model: Model, capsys: pytest.CaptureFixture[str], inspections: list[Path]
) -> None:
    manifest = manifest_of_written(model)
    (model.directory / "notes.txt").touch()
    for _ in range(2):
        code, out, _err = run(capsys, model.directory, "--manifest", manifest)
        assert code == 0
        assert "warning: notes.txt" in out
    assert len(inspections) == 2


def test_another_quantization_than_the_manifest_expects_is_an_error(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write()
    manifest = manifest_of(model, "fp8-block")
    code, out, _ = run(capsys, model.directory, "--manifest", manifest)
    assert code == 1
    assert "compressed-tensors-fp8-block, the manifest expects fp8-block" in out


def test_full_hashes_every_file(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of_written(model)
    assert run(capsys, model.directory, "--manifest", manifest)[0] == 0
    status = model.shard(1).stat()
    content = bytearray(model.shard(1).read_bytes())
    content[-1] ^= 1
    with model.shard(1).open("r+b") as stream:
        stream.write(content)
    os.utime(model.shard(1), ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(capsys, model.directory, "--manifest", manifest)[0] == 0
    assert run(capsys, model.directory, "--manifest", manifest, "--full")[0] == 1


def test_full_alone_is_a_wrong_input(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, model.write(), "--full")[0] == 2
