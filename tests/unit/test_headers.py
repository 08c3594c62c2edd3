"""Headers of safetensors files: what they say, and what a file is that has none."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hub import shard

from fp8fleet.headers import (
    MAX_HEADER,
    Header,
    HeaderError,
    Tensor,
    header_from,
    header_of_entries,
    headers_text,
    read_header,
    read_headers,
)
from lab import tiny_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4\n"
GOOD = {"a": ("F8_E4M3", [2, 3], 6), "b": ("F32", [], 4)}


def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def refusal(path: Path) -> HeaderError:
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    return caught.value


def test_a_header_tells_tensors_metadata_and_where_the_data_begins(tmp_path: Path) -> None:
    content = shard(GOOD)
    header = read_header(file(tmp_path, content))
    assert dict(header.tensors) == {
        "a": Tensor("F8_E4M3", (2, 3), 0, 6),
        "b": Tensor("F32", (), 6, 10),
    }
    assert header.metadata == {"format": "pt"}
    assert header.data_start == len(content) - 10


def test_a_header_of_more_than_one_read_is_read_in_two(tmp_path: Path) -> None:
    content, reads = shard(GOOD, padding=200_000), []

    def read(start: int, count: int) -> bytes:
        reads.append((start, count))
        return content[start : start + count]

    assert len(header_from(read, "x", len(content)).tensors) == 2
    assert len(reads) == 2
    assert sum(count for _, count in reads) == len(content) - 10


@pytest.mark.parametrize("length", range(1, 256))
def test_no_length_of_a_header_looks_like_a_page_or_a_text(length: int) -> None:
    """A header's first byte may be any, also that of ``<``."""
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    content = with_header(text.ljust((length << 8) + ord("<")))
    read = lambda start, count: content[start : start + count]  # noqa: E731
    assert list(header_from(read, "x", len(content)).tensors) == ["a"]


def test_the_data_is_not_read() -> None:
    content = shard({"a": ("F32", [1 << 20], 4 << 20)})
    reads = []

    def read(start: int, count: int) -> bytes:
        reads.append(count)
        return content[start : start + count]

    header_from(read, "x", len(content))
    assert sum(reads) <= 64 * 1024


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"", "empty", "is an empty file"),
        (b"<!DOCTYPE html><html>", "html", "is an HTML page"),
        (b"\xef\xbb\xbf\n <HTML><body>please log in", "html", "is an HTML page"),
        (POINTER, "lfs-pointer", "is a Git LFS pointer"),
        (b"\x05\0\0", "truncated", "has 3 bytes"),
        (struct.pack("<Q", 100) + b"{", "truncated", "has 9 bytes, its header alone announces 108"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "too-long", "of 100000001 bytes"),
        (b"PK\x03\x04\x14\0\0\0\x08\0", "too-long", "announces a header of"),
        (b"<?xml version='1.0'?><Error/>", "html", "is an XML page"),
        (b"<!-- x --><html><body>", "html", "is an HTML page"),
        (b'{"error": "gone"}', "text", "is a text that begins"),
        (with_header(b"[1, 2]"), "not-json", "does not begin with '{'"),
        (with_header(b"{not json"), "not-json", "is not JSON"),
        (with_header(b'{"a": "\xff"}'), "not-json", "is not JSON"),
    ],
)
def test_a_file_without_a_header_is_named_for_what_it_is(
    tmp_path: Path, content: bytes, code: str, said: str
) -> None:
    error = refusal(file(tmp_path, content))
    assert error.code == code
    assert said in error.reason


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {},
        {"dtype": "F32", "shape": [1]},
        {"dtype": 32, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]},
    ],
)
def test_a_tensor_that_is_not_described_as_the_format_says_is_named(entry: Any) -> None:
    with pytest.raises(HeaderError, match="describes tensor 'w'") as caught:
        header_of_entries({"w": entry}, "x")
    assert caught.value.code == "bad-entry"


@pytest.mark.parametrize("metadata", [7, [], {"format": 1}])
def test_metadata_that_is_not_a_map_of_texts_is_refused(metadata: Any) -> None:
    with pytest.raises(HeaderError, match="__metadata__"):
        header_of_entries({"__metadata__": metadata}, "x")


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    entry = b'"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    error = refusal(file(tmp_path, with_header(b"{%s, %s}" % (entry, entry), bytes(4))))
    assert (error.code, error.reason) == ("duplicate", "names 'w' twice in its header")


def test_a_read_that_ends_early_is_a_truncated_file() -> None:
    content = shard(GOOD, padding=100_000)
    with pytest.raises(HeaderError, match="ended after 70000 bytes") as caught:
        header_from(lambda at, count: content[at : min(at + count, 70_000)], "x", len(content))
    assert caught.value.code == "truncated"


# headers.json


def test_stored_headers_are_read_as_they_were_written(tmp_path: Path) -> None:
    headers = {
        "b.safetensors": read_header(file(tmp_path, shard(GOOD))),
        "a.safetensors": Header({}, None),
    }
    path = tmp_path / "headers.json"
    path.write_text(headers_text(headers))
    stored = read_headers(path)
    assert stored == headers
    assert list(stored) == ["a.safetensors", "b.safetensors"]
    assert list(stored["b.safetensors"].tensors) == ["a", "b"]


def test_stored_headers_have_a_shard_a_line_sorted_by_path(tmp_path: Path) -> None:
    header = read_header(file(tmp_path, shard(GOOD)))
    text = headers_text({"b": header, "a": header})
    lines = text.splitlines()
    assert [line[:4] for line in lines] == ["{", '"a":', '"b":', "}"]
    entries = json.loads(text)["a"]
    assert entries["__metadata__"] == {"format": "pt"}
    assert entries["a"] == {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: nested deeper than 100"),
        ('{"a": NaN}', "is not JSON: NaN"),
        ('{"a": {}, "a": {}}', "is not JSON: names 'a' twice"),
        ('{"a\\nb": 1}', r"a\\nb: has a header that is not a JSON object"),
        ("[]", "is not a JSON object of shards"),
        ('{"m.safetensors": []}', "m.safetensors: has a header that is not a JSON object"),
        ('{"m.safetensors": {"w": 1}}', "m.safetensors: describes tensor 'w'"),
    ],
)
def test_stored_headers_that_were_edited_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "headers.json"
    path.write_text(text)
    with pytest.raises(HeaderError, match=said):
        read_headers(path)


def test_stored_headers_that_do_not_exist_are_their_own_case(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_headers(tmp_path / "headers.json")


def test_the_headers_of_the_labs_model_are_the_committed_ones() -> None:
    committed = (tiny_model.COMMITTED / "headers.json").read_text()
    assert committed == tiny_model.stored_headers(tiny_model.model_files())
