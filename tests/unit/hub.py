"""A real HTTP server on 127.0.0.1 that answers as Hugging Face, ModelScope and a plain site do."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

from checkpoints import Model, entries_of, shard_bytes
from httpd import Running

MODEL = "acme/tiny-FP8"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_s3cret"

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
            },
        }
    },
}


def shard(tensors: Mapping[str, tuple[str, list[int], int]], padding: int = 0) -> bytes:
    """A safetensors file: name to dtype, shape and bytes of zeros; ``padding`` spaces behind."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, count) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(entries).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + bytes(at)


def padded(content: bytes, padding: int) -> bytes:
    """A safetensors file with ``padding`` more spaces behind its header."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    return struct.pack("<Q", length + padding) + header + b" " * padding + data


def model_files(layout: str = "ct-block") -> dict[str, bytes]:
    """A model as publishers keep it: weights, configuration, tokenizer, and what nobody loads.

    The header of its second shard takes more than one read.
    """
    model = Model(Path(), layout)
    first, second = model.parts()
    placed = dict.fromkeys(first, model.shard(1).name) | dict.fromkeys(second, model.shard(2).name)
    return {
        ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
        "README.md": b"# tiny\n",
        "chat_template.jinja": b"{{ messages }}",
        "config.json": json.dumps(model.config).encode(),
        "generation_config.json": b'{"temperature": 0.7}',
        "logo.png": b"\x89PNG",
        "model-00001-of-00002.safetensors": shard_bytes(entries_of(first)),
        "model-00002-of-00002.safetensors": padded(shard_bytes(entries_of(second)), 70_000),
        "model.safetensors.index.json": json.dumps({"weight_map": placed}).encode(),
        "modeling_tiny.py": b"raise SystemExit\n",
        "original/consolidated.00.pth": b"pickle",
        "original/params.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
    }


CHOSEN = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]
"""The files of `model_files` that belong to a manifest."""


def sums(files: Mapping[str, bytes]) -> str:
    """What `sha256sum` prints about files."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {path}" for path, content in files.items())
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    url: str
    headers: dict[str, str]
    """Names in lower case."""


@dataclass
class Hub:
    """Serves one model at one commit; the switches make it awkward.

    Hugging Face: ``/api/models/...``, ``/MODEL/resolve/...``; ModelScope: ``/api/v1/models/...``,
    ``/models/MODEL/resolve/...``; a plain site: ``/files/PATH`` and ``/SHA256SUMS``.
    """

    files: dict[str, bytes] = field(default_factory=model_files)
    page: int = 1000
    """Entries a page of the tree."""
    next_host: str | None = None
    """The host that the Link header names; None: this server's."""
    ranges: bool = True
    head: bool = True
    gated: bool = False
    """Files want the token."""
    private: bool = False
    """Everything wants the token."""
    sha256_told: bool = True
    """ModelScope tells digests."""
    commits: list[str] = field(default_factory=lambda: [COMMIT])
    """The newest commit as told from question to question; the last one stays."""
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Entries of the tree that are told otherwise, by path."""
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Answers in place of the ordinary ones, by path."""
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """More headers of these answers."""
    endless: bool = False
    """The tree goes on for ever, without files."""
    broken: int = 0
    """How many ranges end early first."""
    busy: int = 0
    """How many requests get 503 first."""
    retry_after: str = "0"
    """What 503 says of the next try."""
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._httpd = Running(self, _Handler)

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        return f"http://127.0.0.1:{self._httpd.server_port}"

    def paths(self, method: str = "GET") -> list[str]:
        """The paths that were asked for, in order."""
        return [urlsplit(asked.url).path for asked in self.asked if asked.method == method]

    def __enter__(self) -> Hub:
        self._httpd.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._httpd.__exit__()

    def is_lfs(self, path: str) -> bool:
        """Whether the hub keeps the file in LFS."""
        return path.endswith((".safetensors", ".pth", "tokenizer.json"))

    def entry(self, path: str) -> dict[str, Any]:
        """A file of Hugging Face's tree."""
        content = self.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
        if self.is_lfs(path):
            oid = hashlib.sha256(content).hexdigest()
            entry |= {"oid": "e" * 40, "lfs": {"oid": oid, "size": len(content)}}
            entry["lfs"]["pointerSize"] = 134
        else:
            blob = b"blob %d\0%s" % (len(content), content)
            entry["oid"] = hashlib.sha1(blob).hexdigest()
        return entry | self.listed.get(path, {})

    def tree(self) -> list[dict[str, Any]]:
        """Hugging Face's tree, directories first."""
        directory = {"type": "directory", "path": "original", "size": 0, "oid": "d" * 40}
        return [directory, *(self.entry(path) for path in self.files)]

    def modelscope_file(self, path: str) -> dict[str, Any]:
        """A file of ModelScope's listing."""
        content = self.files[path]
        digest = hashlib.sha256(content).hexdigest() if self.sha256_told else ""
        return {
            "Name": path.rpartition("/")[2],
            "Path": path,
            "Type": "blob",
            "Size": len(content),
            "Sha256": digest,
            "IsLFS": self.is_lfs(path),
            "Revision": COMMIT,
        } | self.listed.get(path, {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return cast(Hub, cast(Running, self.server).owner)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self) -> None:
        hub = self.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.asked.append(Asked(self.command, self.path, headers))
        path = unquote(urlsplit(self.path).path)
        if hub.busy:
            hub.busy -= 1
            self._send(503, b"busy", {"Retry-After": hub.retry_after})
        elif path in hub.answers:
            status, body = hub.answers[path]
            self._send(status, body, hub.headers.get(path))
        elif self.command == "HEAD" and not hub.head:
            self._send(405, b"")
        elif hub.private and not path.startswith("/cdn/") and not self._has_token():
            self._send(401, b"no", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/v1/"):
            self._modelscope(path.removeprefix("/api/v1/models/"))
        elif path.startswith("/api/models/"):
            self._hugging_face(path.removeprefix("/api/models/"))
        else:
            self._file(path)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _hugging_face(self, path: str) -> None:
        model, _, rest = path.partition("/revision/")
        if not rest:
            model, _, rest = path.partition("/tree/")
        if model != MODEL:
            self._send(404, b"no", {"X-Error-Code": "RepoNotFound"})
        elif rest not in ("main", "refs/pr/1", COMMIT):
            self._send(404, b"no", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            self._tree()
        else:
            self._json({"id": MODEL, "sha": COMMIT})

    def _tree(self) -> None:
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        at = int(asked.get("cursor", ["0"])[0])
        entries = self.hub.tree()
        following = {}
        if at + self.hub.page < len(entries) or self.hub.endless:
            host = self.hub.next_host or self.hub.url
            query = f"recursive=true&cursor={at + self.hub.page}"
            following = {"Link": f'<{host}{url.path}?{query}>; rel="next"'}
        self._json(entries[at : at + self.hub.page], following)

    def _modelscope(self, path: str) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        revision = (asked.get("Ref") or asked.get("Revision") or ["?"])[0]
        if not path.startswith(f"{MODEL}/"):
            self._json({"Code": 10010205001, "Message": "model not found", "Success": False})
        elif revision != "master":
            self._json({"Code": 10010205002, "Message": "revision not found", "Success": False})
        elif path.endswith("/commits"):
            commits = self.hub.commits
            commit = commits.pop(0) if len(commits) > 1 else commits[0]
            self._json({"Code": 200, "Data": {"Commit": [{"Id": commit}]}, "TotalCount": 1})
        else:
            files = [self.hub.modelscope_file(path) for path in self.hub.files]
            directory = {"Type": "tree", "Path": "original", "Size": 0, "Sha256": ""}
            self._json({"Code": 200, "Data": {"Files": [directory, *files]}, "Success": True})

    def _file(self, path: str) -> None:
        hub = self.hub
        prefixes = (f"/{MODEL}/resolve/{COMMIT}/", f"/models/{MODEL}/resolve/{COMMIT}/")
        for prefix in (*prefixes, "/files/", "/cdn/"):
            name = path.removeprefix(prefix)
            if name != path and name in hub.files:
                break
        else:
            found = path == "/SHA256SUMS"
            body = sums(hub.files).encode() if found else b"no"
            self._send(
                200 if found else 404, body, {} if found else {"X-Error-Code": "EntryNotFound"}
            )
            return
        if hub.gated and prefix in prefixes and not self._has_token():
            self._send(401, b"no", {"X-Error-Code": "GatedRepo"})
        elif prefix == prefixes[0] and hub.is_lfs(name):
            # Another name of this machine: clients must not send the token there.
            cdn = hub.url.replace("127.0.0.1", "localhost")
            self._send(302, b"", {"Location": f"{cdn}/cdn/{quote(name)}?Signature=s1gned"})
        else:
            self._content(hub.files[name])

    def _content(self, body: bytes) -> None:
        asked = self.headers.get("Range")
        if asked is None or not self.hub.ranges:
            self._send(200, body)
            return
        first, last = asked.removeprefix("bytes=").split("-")
        piece = body[int(first) : int(last) + 1]
        if self.hub.broken:
            self.hub.broken -= 1
            self.close_connection = True
            self._send(206, piece[:9], {"Content-Range": "bytes 0-9/9", "Content-Length": "999"})
            return
        span = f"bytes {first}-{int(first) + len(piece) - 1}/{len(body)}"
        self._send(206, piece, {"Content-Range": span})

    def _json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
