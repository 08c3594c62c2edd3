"""How files come into a model directory: every fault against a real HTTP server."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpd
import pytest

from fp8fleet import fetch as fetching
from fp8fleet import hostcli
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch import (
    FetchOptions,
    FetchResult,
    PlainReporter,
    Reporter,
    RichReporter,
    check,
    directory_lock,
    human_bytes,
    origin,
    verify,
)
from fp8fleet.fetch.pace import RateLimit
from fp8fleet.fetch.partial import Partial
from fp8fleet.manifest import Manifest, ManifestFile
from fp8fleet.secrets import SecretRef

NAME = "model.safetensors"
BODY = bytes(range(256)) * 2000
OTHER = bytes(reversed(range(256))) * 2000
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "requests_ca_bundle", "curl_ca_bundle"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[httpd.Server]:
    with httpd.Server({NAME: BODY}) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost, which signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "ca.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(pair[1]), "-out", str(pair[0])]
    subprocess.run(command, check=True, capture_output=True)
    return pair


class Notes(Reporter):
    """Keeps what an operator would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def manifest_of(files: dict[str, bytes], *sources: str) -> Manifest:
    return Manifest(
        name="tiny",
        revision="r1",
        sources=sources,
        files=tuple(
            ManifestFile(path=path, size=len(body), sha256=sha(body))
            for path, body in files.items()
        ),
    )


def options(**changes: Any) -> FetchOptions:
    """Options that never wait."""
    settings: dict[str, Any] = {"sleep": lambda seconds: None, "margin_bytes": 0}
    return FetchOptions(**{**settings, **changes})


def fetch(
    directory: Path, *sources: str, files: dict[str, bytes] | None = None, **changes: Any
) -> FetchResult:
    manifest = manifest_of(files or {NAME: BODY}, *sources)
    return fetching.fetch(manifest, directory, options=options(**changes))


def failure(directory: Path, *sources: str, **changes: Any) -> str:
    """The one line of a fetch that fails; nothing may have its final name."""
    with pytest.raises(CheckFailed) as caught:
        fetch(directory, *sources, **changes)
    assert not (directory / NAME).exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def interrupted(directory: Path, server: httpd.Server, count: int) -> None:
    """Leave the first ``count`` bytes of the file, as a killed run does."""
    server.answers[NAME] = [httpd.cut_after(count)]
    with pytest.raises(CheckFailed):
        fetch(directory, server.url, retries=0)
    assert (directory / ".partial" / NAME).stat().st_size == count
    server.requests.clear()
    server.sent = 0


# --- the ordinary way ---------------------------------------------------------------------------


def test_files_arrive_under_their_names_and_leave_nothing_beside(
    tmp_path: Path, server: httpd.Server
) -> None:
    files = {NAME: BODY, "sub/dir/config.json": b"{}", "empty.txt": b"", "odd name#1.txt": b"x"}
    server.files = {**files, "odd%20name%231.txt": b"x"}
    result = fetch(tmp_path / "m", server.url, files=files)
    assert {path: (tmp_path / "m" / path).read_bytes() for path in files} == files
    assert result.fetched == tuple(sorted(files))
    assert result.bytes_received == len(BODY) + 3
    left = {path.name for path in (tmp_path / "m").iterdir()} - {
        path.split("/")[0] for path in files
    }
    assert left == {".fp8fleet-stamp.json", ".fp8fleet-lock"}


def test_a_second_fetch_sends_no_request_and_hashes_nothing(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(tmp_path, server.url)
    monkeypatch.setattr(check, "hash_file", lambda *_: pytest.fail("hashed"))
    result = fetch(tmp_path, server.url)
    assert (result.fetched, result.kept) == ((), (NAME,))
    assert len(server.requests) == 1


def test_files_that_are_there_and_right_are_kept_without_any_source(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(BODY)
    assert fetch(tmp_path).kept == (NAME,)


def test_no_source_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no source to fetch from") as caught:
        fetch(tmp_path)
    assert caught.value.exit_code == 2


def test_given_sources_replace_the_manifests(tmp_path: Path, server: httpd.Server) -> None:
    manifest = manifest_of({NAME: BODY}, "http://127.0.0.1:1")
    fetching.fetch(manifest, tmp_path, [server.url + "/"], options())
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_directory_is_a_source(tmp_path: Path) -> None:
    origin = tmp_path / "with space"
    origin.mkdir()
    (origin / NAME).write_bytes(BODY)
    fetch(tmp_path / "m", origin.as_uri())
    assert (tmp_path / "m" / NAME).read_bytes() == BODY


def test_a_directory_without_the_file_is_named(tmp_path: Path) -> None:
    origin = tmp_path.as_uri()
    assert f"{origin}: no such file" in failure(tmp_path / "m", origin)


def test_a_wrong_file_under_a_final_name_loses_it_and_is_fetched_again(
    tmp_path: Path, server: httpd.Server
) -> None:
    (tmp_path / NAME).write_bytes(OTHER)
    notes = Notes()
    fetch(tmp_path, server.url, reporter=notes)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert (tmp_path / ".quarantine/files" / NAME).read_bytes() == OTHER
    assert f"has sha256 {sha(OTHER)}, expected {sha(BODY)}" in notes.lines[0]


def test_several_files_come_at_once(tmp_path: Path, server: httpd.Server) -> None:
    files = {f"{number}.bin": BODY for number in range(4)}
    server.files = files
    meeting = threading.Barrier(4, timeout=20)

    def together(handler: httpd.Handler) -> None:
        meeting.wait()
        httpd.serve_file(handler)

    server.always = dict.fromkeys(files, together)
    assert len(fetch(tmp_path, server.url, files=files).fetched) == 4


# --- resuming -----------------------------------------------------------------------------------


def test_a_broken_connection_is_resumed_where_it_broke(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.answers[NAME] = [httpd.cut_after(100_000), httpd.cut_after(50_000)]
    fetch(tmp_path, server.url)
    assert server.ranges() == [None, "bytes=100000-", "bytes=150000-"]
    assert server.sent == len(BODY)


def test_a_later_run_resumes_and_names_the_version(tmp_path: Path, server: httpd.Server) -> None:
    server.etags[NAME] = '"v1"'
    interrupted(tmp_path, server, 100_000)
    fetch(tmp_path, server.url)
    assert server.ranges() == ["bytes=100000-"]
    assert server.requests[0].headers["if-range"] == '"v1"'
    assert server.sent == len(BODY) - 100_000


def test_a_file_that_changed_at_the_source_is_fetched_from_zero(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.etags[NAME] = '"old"'
    server.files[NAME] = OTHER
    interrupted(tmp_path, server, 100_000)
    server.etags[NAME] = '"new"'
    server.files[NAME] = BODY
    fetch(tmp_path, server.url)
    assert server.sent == len(BODY)


def test_a_file_that_changes_at_the_source_midway_is_fetched_from_zero(
    tmp_path: Path, server: httpd.Server
) -> None:
    def replace_and_break(handler: httpd.Handler) -> None:
        httpd.cut_after(100_000)(handler)
        server.files[NAME], server.etags[NAME] = BODY, '"new"'

    server.files[NAME], server.etags[NAME] = OTHER, '"old"'
    server.answers[NAME] = [replace_and_break]
    fetch(tmp_path, server.url)
    assert server.ranges() == [None, "bytes=100000-"]
    assert server.requests[1].headers["if-range"] == '"old"'
    assert (tmp_path / NAME).read_bytes() == BODY
    assert not (tmp_path / ".quarantine").exists()


def test_a_range_of_another_version_is_not_appended(tmp_path: Path, server: httpd.Server) -> None:
    """A server that knows ranges but not If-Range."""
    server.etags[NAME] = '"old"'
    server.files[NAME] = OTHER
    interrupted(tmp_path, server, 100_000)
    rest = BODY[100_000:]
    span = f"bytes 100000-{len(BODY) - 1}/{len(BODY)}"
    server.files[NAME] = BODY
    server.etags[NAME] = '"new"'
    server.answers[NAME] = [httpd.status(206, rest, ETag='"new"', Content_Range=span)]
    result = fetch(tmp_path, server.url)
    assert result.bytes_received == len(BODY)
    assert server.ranges() == ["bytes=100000-", None]


def test_another_range_than_asked_for_is_not_appended(tmp_path: Path, server: httpd.Server) -> None:
    interrupted(tmp_path, server, 100_000)
    span = f"bytes 0-{len(BODY) - 1}/{len(BODY)}"
    server.answers[NAME] = [httpd.status(206, BODY, Content_Range=span)]
    fetch(tmp_path, server.url)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_server_that_ignores_ranges_starts_over(tmp_path: Path, server: httpd.Server) -> None:
    interrupted(tmp_path, server, 100_000)
    server.always[NAME] = httpd.ignoring_ranges
    fetch(tmp_path, server.url)
    assert server.sent == len(BODY)
    assert not (tmp_path / ".quarantine").exists()


def test_a_wrong_seam_is_not_blamed_on_the_source(tmp_path: Path, server: httpd.Server) -> None:
    """What an earlier run left may have been damaged by a power loss."""
    interrupted(tmp_path, server, 100_000)
    (tmp_path / ".partial" / NAME).write_bytes(bytes(100_000))
    fetch(tmp_path, server.url)
    assert server.ranges() == ["bytes=100000-", None]
    assert not (tmp_path / ".quarantine").exists()


def test_a_source_with_a_wrong_rest_is_tried_from_zero_only_once(
    tmp_path: Path, server: httpd.Server
) -> None:
    interrupted(tmp_path, server, 100_000)
    server.files[NAME] = OTHER
    message = failure(tmp_path, server.url)
    assert server.ranges() == ["bytes=100000-", None]
    assert sha(OTHER) in message


def test_a_wrong_source_that_always_breaks_is_not_tried_for_ever(
    tmp_path: Path, server: httpd.Server
) -> None:
    def breaking(handler: httpd.Handler) -> None:
        assert len(server.requests) <= 4
        resumed = "Range" in handler.headers
        (httpd.serve_file if resumed else httpd.cut_after(100_000))(handler)

    server.files[NAME] = OTHER
    server.always[NAME] = breaking
    assert sha(OTHER) in failure(tmp_path, server.url)
    assert server.ranges() == [None, "bytes=100000-"] * 2


def test_a_partial_file_longer_than_the_file_is_thrown_away(
    tmp_path: Path, server: httpd.Server
) -> None:
    interrupted(tmp_path, server, 100_000)
    with (tmp_path / ".partial" / NAME).open("ab") as partial:
        partial.write(BODY)
    fetch(tmp_path, server.url)
    assert server.ranges() == [None]


def test_a_partial_file_of_another_version_is_thrown_away(
    tmp_path: Path, server: httpd.Server
) -> None:
    interrupted(tmp_path, server, 100_000)
    server.files[NAME] = OTHER
    fetch(tmp_path, server.url, files={NAME: OTHER})
    assert server.ranges() == [None]


def test_a_whole_partial_file_needs_no_request(tmp_path: Path, server: httpd.Server) -> None:
    interrupted(tmp_path, server, 100_000)
    (tmp_path / ".partial" / NAME).write_bytes(BODY)
    fetch(tmp_path, server.url)
    assert server.requests == []


def test_another_source_goes_on_where_the_first_one_broke(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.cut_after(100_000)
    with httpd.Server({NAME: BODY}) as second:
        fetch(tmp_path, server.url, second.url, retries=0)
        assert second.ranges() == ["bytes=100000-"]
        assert "if-range" not in second.requests[0].headers


def test_a_killed_fetch_goes_on_behind_what_it_had(tmp_path: Path) -> None:
    body = os.urandom(8_000_000)
    with httpd.Server({NAME: body}) as server:
        server.etags[NAME] = '"v1"'
        server.answers[NAME] = [httpd.slow(0.02)]
        manifest = write_manifest(tmp_path, {NAME: body}, server.url)
        command = [sys.executable, "-m", "fp8fleet.hostcli", "fetch", str(manifest)]
        directory = tmp_path / "m"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen([*command, str(directory)], env=environment)
        partial = directory / ".partial" / NAME
        wait_for(lambda: partial.exists() and partial.stat().st_size > 2_000_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (directory / NAME).exists()
        fetch(directory, server.url, files={NAME: body})
        first, second = server.ranges()
        assert first is None
        assert second is not None
        assert int(second.removeprefix("bytes=").rstrip("-")) > 2_000_000
        assert server.sent < 1.5 * len(body)
    assert (directory / NAME).read_bytes() == body


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def write_manifest(tmp_path: Path, files: dict[str, bytes], *sources: str) -> Path:
    manifest = manifest_of(files, *sources)
    lines = ['name = "tiny"', 'revision = "r1"', f"sources = {json.dumps(list(sources))}"]
    for file in manifest.files:
        lines += ["[[files]]", f'path = "{file.path}"', f"size = {file.size}"]
        lines.append(f'sha256 = "{file.sha256}"')
    path = tmp_path / "manifest.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


# --- what sources send --------------------------------------------------------------------------


def test_wrong_bytes_go_to_quarantine_and_the_next_source_is_tried(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.files[NAME] = OTHER
    with httpd.Server({NAME: BODY}) as second:
        fetch(tmp_path, server.url, second.url)
        assert second.ranges() == [None]
    assert (tmp_path / NAME).read_bytes() == BODY
    assert (tmp_path / ".quarantine/files" / NAME).read_bytes() == OTHER
    note = json.loads((tmp_path / ".quarantine/notes.jsonl").read_text())
    assert note["source"] == f"{server.url}/{NAME}"
    assert (note["expected"], note["got"]) == (sha(BODY), sha(OTHER))


def test_wrong_bytes_everywhere_name_file_digests_sources_and_what_to_do(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.files[NAME] = OTHER
    message = failure(tmp_path, server.url)
    for part in (NAME, str(len(BODY)), sha(BODY), sha(OTHER), server.url, "tell its publisher"):
        assert part in message
    assert len(server.requests) == 1


def test_404_is_said_and_not_tried_again(tmp_path: Path, server: httpd.Server) -> None:
    server.files.clear()
    message = failure(tmp_path, server.url)
    assert f"{server.url}: 404 Not Found" in message
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [httpd.status(200, httpd.HTML), httpd.chunked(httpd.HTML)])
def test_an_html_page_is_called_one(
    tmp_path: Path, server: httpd.Server, answer: httpd.Answer
) -> None:
    server.always[NAME] = answer
    message = failure(tmp_path, server.url)
    assert f"an HTML page: {len(httpd.HTML)} bytes, expected {len(BODY)}" in message
    assert len(server.requests) == 1


def test_an_html_page_does_not_cost_the_bytes_that_are_there(
    tmp_path: Path, server: httpd.Server
) -> None:
    interrupted(tmp_path, server, 100_000)
    server.answers[NAME] = [httpd.chunked(httpd.HTML)]
    assert "an HTML page" in failure(tmp_path, server.url)
    assert (tmp_path / ".partial" / NAME).stat().st_size == 100_000


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path, server: httpd.Server) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    server.files[NAME] = pointer
    assert "a Git LFS pointer" in failure(tmp_path, server.url)


def test_a_truncated_file_at_the_source_is_called_one(tmp_path: Path, server: httpd.Server) -> None:
    server.files[NAME] = BODY[:-128]
    message = failure(tmp_path, server.url)
    assert f"a truncated file: {len(BODY) - 128} bytes, expected {len(BODY)}" in message
    assert len(server.requests) == 1


def test_a_truncated_file_of_unannounced_length_is_called_one(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.files[NAME] = BODY[:-128]
    server.answers[NAME] = [httpd.unannounced(BODY[:-128])]
    message = failure(tmp_path, server.url)
    assert f"a truncated file: {len(BODY) - 128} bytes, expected {len(BODY)}" in message


def test_a_larger_file_is_called_one(tmp_path: Path, server: httpd.Server) -> None:
    server.files[NAME] = BODY + b"x"
    assert f"a larger file: {len(BODY) + 1} bytes" in failure(tmp_path, server.url)


def test_an_empty_file_is_called_one(tmp_path: Path, server: httpd.Server) -> None:
    server.files[NAME] = b""
    assert "an empty file" in failure(tmp_path, server.url)


def test_more_than_expected_without_an_announced_length_is_cut_and_refused(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.chunked(BODY + b"more")
    assert f"sends more bytes than the {len(BODY)} expected" in failure(tmp_path, server.url)
    assert len(server.requests) == 1


def test_bytes_behind_the_announced_length_reach_no_file(
    tmp_path: Path, server: httpd.Server
) -> None:
    files = {NAME: BODY, "b.bin": OTHER}
    server.files = files
    server.answers[NAME] = [httpd.overflowing(BODY + b"HTTP/1.1 200 OK\r\n\r\n", len(BODY))]
    fetch(tmp_path, server.url, files=files, threads=1)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert (tmp_path / "b.bin").read_bytes() == OTHER


def test_chunked_answers_without_a_length_are_fine(tmp_path: Path, server: httpd.Server) -> None:
    server.always[NAME] = httpd.chunked(BODY)
    fetch(tmp_path, server.url)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_length_that_is_a_lie_is_tried_a_bounded_number_of_times(
    tmp_path: Path, server: httpd.Server
) -> None:
    """Announces all, sends a part, ignores ranges: never gets further."""

    def lie(handler: httpd.Handler) -> None:
        handler.start(200, Content_Length=len(BODY))
        handler.send(BODY[:1000])
        handler.close_connection = True

    server.always[NAME] = lie
    message = failure(tmp_path, server.url, retries=3)
    assert "connection broken" in message
    assert "(4 tries)" in message
    assert len(server.requests) == 4


def test_a_compressed_answer_is_refused(tmp_path: Path, server: httpd.Server) -> None:
    server.always[NAME] = httpd.status(200, b"\x1f\x8b", Content_Encoding="gzip")
    assert "a compressed answer" in failure(tmp_path, server.url)
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_redirects_are_followed_and_their_signatures_not_shown(
    tmp_path: Path, server: httpd.Server
) -> None:
    with httpd.Server({f"{NAME}?sig=hunter2": OTHER}) as store:
        server.always[NAME] = httpd.redirect(f"{store.url}/{NAME}?sig=hunter2")
        message = failure(tmp_path, server.url)
        assert f"{store.url}/{NAME}" in message
        assert "hunter2" not in message
        store.files[f"{NAME}?sig=hunter2"] = BODY
        fetch(tmp_path, server.url)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_range_of_a_file_of_another_size_is_refused(tmp_path: Path, server: httpd.Server) -> None:
    interrupted(tmp_path, server, 100_000)
    span = f"bytes 100000-{len(BODY) - 1}/{len(BODY) + 5}"
    server.always[NAME] = httpd.status(206, BODY[100_000:], Content_Range=span)
    message = failure(tmp_path, server.url)
    assert f"a larger file: {len(BODY) + 5} bytes, expected {len(BODY)}" in message
    assert (tmp_path / ".partial" / NAME).stat().st_size == 100_000


def test_redirects_to_what_is_not_the_web_are_refused(tmp_path: Path, server: httpd.Server) -> None:
    server.always[NAME] = httpd.redirect(f"file://{tmp_path}/secret")
    assert "redirects to what is no web address" in failure(tmp_path, server.url)


def test_redirects_in_a_circle_are_refused(tmp_path: Path, server: httpd.Server) -> None:
    server.always[NAME] = httpd.redirect(f"{server.url}/{NAME}")
    assert "redirects without end" in failure(tmp_path, server.url)


NO_ADDRESSES = [
    "http://[::1",
    "http://a..b/x",
    "http://" + "a" * 300 + "/x",
    "http://localhost:999999/x",
    "http://a b/x",
    "http://*/x",
    "mailto:x",
    "http://localhost/\xff\xfe",
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_a_redirect_to_no_address_leaves_the_next_source(
    tmp_path: Path, server: httpd.Server, address: str
) -> None:
    server.always[NAME] = httpd.redirect(address)
    notes = Notes()
    with httpd.Server({NAME: BODY}) as second:
        fetch(tmp_path, server.url, second.url, reporter=notes)
    assert f"{server.url}: redirects to what is no web address:" in notes.lines[0]
    assert len(server.requests) == 1
    assert (tmp_path / NAME).read_bytes() == BODY


def test_the_body_of_a_redirect_is_not_read(tmp_path: Path, server: httpd.Server) -> None:
    with httpd.Server({NAME: BODY}) as store:
        server.always[NAME] = httpd.redirect_with_a_body_without_end(f"{store.url}/{NAME}")
        fetch(tmp_path, server.url)
    assert (tmp_path / NAME).read_bytes() == BODY


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 5000])
def test_a_length_of_absurd_digits_is_no_length(
    tmp_path: Path, server: httpd.Server, digits: str
) -> None:
    server.answers[NAME] = [
        httpd.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n%s" % pair)
        for pair in [(digits.encode(), BODY)]
    ]
    fetch(tmp_path, server.url)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_range_of_absurd_digits_is_another_range(tmp_path: Path, server: httpd.Server) -> None:
    interrupted(tmp_path, server, 100_000)
    span = f"bytes {'9' * 5000}-5/{'9' * 5000}"
    server.answers[NAME] = [httpd.status(206, BODY, Content_Range=span)]
    fetch(tmp_path, server.url)
    assert server.ranges() == ["bytes=100000-", None]


def test_what_a_server_says_moves_no_cursor_and_forges_no_line(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.raw(b"HTTP/1.1 404 \x1b[31mred\r\nContent-Length: 0\r\n\r\n")
    assert r"404 \x1b[31mred" in failure(tmp_path, server.url)
    server.always[NAME] = httpd.raw(b"\x1b[2J\xff\x00" * 100 + b"\r\n")
    message = failure(tmp_path, server.url, retries=0)
    assert r"answers with no HTTP: \x1b[2J" in message
    assert message.isprintable()


def test_an_answer_that_says_it_is_not_compressed_is_not(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.status(200, BODY, Content_Encoding="Identity")
    fetch(tmp_path, server.url)


# --- failures that pass -------------------------------------------------------------------------


def test_429_and_5xx_are_tried_again_with_growing_pauses(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.answers[NAME] = [httpd.status(429), httpd.status(500), httpd.status(503)]
    pauses: list[float] = []
    fetch(tmp_path, server.url, sleep=pauses.append)
    assert pauses == [1, 2, 4]


def test_a_server_that_names_a_pause_gets_it_within_bounds(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.answers[NAME] = [
        httpd.status(429, Retry_After="7"),
        httpd.status(503, Retry_After="86400"),
    ]
    pauses: list[float] = []
    fetch(tmp_path, server.url, sleep=pauses.append)
    assert pauses == [7, 60]


def test_a_pause_until_a_date_is_kept_too(tmp_path: Path, server: httpd.Server) -> None:
    soon = formatdate(time.time() + 30, usegmt=True)
    past = formatdate(time.time() - 30, usegmt=True)
    server.answers[NAME] = [httpd.status(503, Retry_After=text) for text in (soon, past, "soon")]
    pauses: list[float] = []
    fetch(tmp_path, server.url, sleep=pauses.append)
    assert 25 < pauses[0] <= 30
    assert pauses[1:] == [2, 4]


@pytest.mark.parametrize(
    "text",
    [
        "9" * 400,
        "9" * 5000,
        "Mon, 1 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 1 Jan 0001 00:00:00 GMT",
        "-1",
        "",
    ],
)
def test_a_pause_that_is_none_is_the_ordinary_one(
    tmp_path: Path, server: httpd.Server, text: str
) -> None:
    server.answers[NAME] = [httpd.status(429, Retry_After=text)]
    pauses: list[float] = []
    fetch(tmp_path, server.url, sleep=pauses.append)
    assert pauses == [1]


def test_a_server_that_stays_broken_is_left_for_the_next(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.status(503)
    with httpd.Server({NAME: BODY}) as second:
        fetch(tmp_path, server.url, second.url, retries=2)
    assert len(server.requests) == 3


def test_a_refused_connection_is_tried_again_and_then_named(tmp_path: Path) -> None:
    pauses: list[float] = []
    message = failure(tmp_path, "http://127.0.0.1:1", retries=2, sleep=pauses.append)
    assert "Connection refused (3 tries)" in message
    assert pauses == [1, 2]


def test_progress_forgives_earlier_failures(tmp_path: Path) -> None:
    body = os.urandom(5 << 20)
    with httpd.Server({NAME: body}) as server:
        server.answers[NAME] = [httpd.cut_after(1 << 20) for _ in range(4)]
        pauses: list[float] = []
        fetch(tmp_path, server.url, files={NAME: body}, retries=1, sleep=pauses.append)
        assert pauses == [1, 1, 1, 1]
        assert server.sent == len(body)


def test_a_silent_server_is_cut_off_and_resumed(tmp_path: Path, server: httpd.Server) -> None:
    server.answers[NAME] = [httpd.stalled_after(100_000)]
    notes = Notes()
    fetch(tmp_path, server.url, stall_s=0.3, reporter=notes)
    assert server.ranges() == [None, "bytes=100000-"]
    assert "stalled: no byte for 0.3 s" in notes.lines[0]


def test_a_trickling_server_is_cut_off_and_resumed(tmp_path: Path, server: httpd.Server) -> None:
    server.answers[NAME] = [httpd.trickling]
    notes = Notes()
    fetch(tmp_path, server.url, stall_s=0.4, reporter=notes)
    assert "stalled:" in notes.lines[0]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("start", "line"),
    [(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
)
def test_a_head_without_end_is_cut_off(
    tmp_path: Path, server: httpd.Server, certificate: tuple[Path, Path], start: bytes, line: bytes
) -> None:
    notes = Notes()
    server.answers[NAME] = [httpd.head_without_end(start, line)]
    fetch(tmp_path / "plain", server.url, stall_s=0.4, reporter=notes)
    with httpd.Server({NAME: BODY}, tls=certificate) as secure:
        secure.answers[NAME] = [httpd.head_without_end(start, line)]
        url = secure.url.replace("127.0.0.1", "localhost")
        secured = tmp_path / "secure"
        fetch(secured, url, stall_s=0.4, reporter=notes, ca_bundle=certificate[0])
    told = [line for line in notes.lines if "stalled: no answer in 0.4 s: next try" in line]
    assert len(told) == 2


def test_a_proxy_that_never_ends_its_head_is_cut_off(tmp_path: Path, server: httpd.Server) -> None:
    server.always["origin.invalid:443"] = httpd.head_without_end(
        b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"
    )
    arguments = {"proxy": server.url, "connect_timeout_s": 0.4, "retries": 0}
    assert "(1 tries)" in failure(tmp_path, "https://origin.invalid", **arguments)


def test_a_share_that_hangs_when_opened_is_left_for_the_next_source(
    tmp_path: Path, server: httpd.Server
) -> None:
    """Opening a pipe that nobody writes into waits for ever, as a lost NFS server does.

    In a process of its own: this one's threads may be gevent's, which all wait for it then.
    """
    share = tmp_path / "share"
    share.mkdir()
    os.mkfifo(share / NAME)
    manifest = write_manifest(tmp_path, {NAME: BODY}, share.as_uri(), server.url)
    code = (
        "import sys; from pathlib import Path; from fp8fleet.fetch import *\n"
        "from fp8fleet.manifest import load_manifest\n"
        "with PlainReporter(sys.stdout) as reporter:\n"
        "    options = FetchOptions(stall_s=0.2, retries=1, backoff_s=0, reporter=reporter)\n"
        "    fetch(load_manifest(Path(sys.argv[1])), Path(sys.argv[2]), options=options)"
    )
    command = [sys.executable, "-c", code, str(manifest), str(tmp_path / "m")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "stalled: no byte for 0.2 s: check the mount: next try" in shown.stdout
    assert (tmp_path / "m" / NAME).read_bytes() == BODY


def test_a_share_that_hangs_midway_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(BODY)
    released = threading.Event()
    read = origin._Reading._read
    hung: list[origin._Reading] = []

    def hang_once(self: origin._Reading, stream: io.FileIO) -> None:
        if not hung:
            hung.append(self)
            self._left = 100_000
            self._hand(origin._Opened(0, len(BODY), "v1"))
            self._hand(stream.read(100_000))
            released.wait(60)
        else:
            read(self, stream)

    monkeypatch.setattr(origin._Reading, "_read", hang_once)
    notes = Notes()
    fetch(tmp_path / "m", tmp_path.as_uri(), stall_s=0.3, reporter=notes)
    released.set()
    assert "stalled" in notes.lines[0]
    assert (tmp_path / "m" / NAME).read_bytes() == BODY


def test_all_threads_share_the_rate_limit(tmp_path: Path, server: httpd.Server) -> None:
    files = {f"{number}.bin": BODY for number in range(4)}
    server.files = files
    pauses: list[float] = []
    fetch(tmp_path, server.url, files=files, rate_limit=500e3, sleep=pauses.append)
    # Nobody really pauses: the last byte is due when all of them are paid for.
    assert max(pauses) == pytest.approx(4 * len(BODY) / 500e3, rel=0.2)


def test_a_rate_limit_pays_for_what_came_and_not_for_what_did_not() -> None:
    now, pauses = [0.0], list[float]()
    limit = RateLimit(1000, pauses.append, lambda: now[0])
    limit.wait_for(500)
    limit.wait_for(500)
    now[0] = 10.0
    limit.wait_for(100)
    assert pauses == pytest.approx([0.5, 1.0, 0.1])
    assert RateLimit(None, pauses.append).charge(10**9) == 0


def test_a_connection_broken_behind_the_last_byte_is_no_failure(
    tmp_path: Path, server: httpd.Server
) -> None:
    def no_last_chunk(handler: httpd.Handler) -> None:
        handler.close_connection = True
        handler.start(200, Transfer_Encoding="chunked")
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(BODY), BODY))

    server.answers[NAME] = [no_last_chunk]
    fetch(tmp_path, server.url)
    assert len(server.requests) == 1


# --- proxies, authorities, tokens ---------------------------------------------------------------


def test_requests_pass_the_proxy(tmp_path: Path) -> None:
    with httpd.Server({f"http://origin.invalid/{NAME}": BODY}) as proxy:
        fetch(tmp_path, "http://origin.invalid", proxy=proxy.url)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_the_token_goes_to_the_source_but_not_to_where_it_redirects(
    tmp_path: Path, server: httpd.Server
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    with httpd.Server({NAME: BODY}) as store:
        elsewhere = store.url.replace("127.0.0.1", "localhost")
        server.always[NAME] = httpd.redirect(f"{elsewhere}/{NAME}")
        fetch(tmp_path / "m", server.url, token=SecretRef("file", str(token)))
        assert server.requests[0].headers["authorization"] == "Bearer s3cret"
        assert "authorization" not in store.requests[0].headers


def test_the_token_does_not_go_to_another_port(tmp_path: Path, server: httpd.Server) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    with httpd.Server({NAME: BODY}) as store:
        server.always[NAME] = httpd.redirect(f"{store.url}/{NAME}")
        fetch(tmp_path / "m", server.url, token=SecretRef("file", str(token)))
        assert "authorization" not in store.requests[0].headers


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, server: httpd.Server) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    with pytest.raises(OperatorError, match="mode 0644, expected 0600") as caught:
        fetch(tmp_path / "m", server.url, token=SecretRef("file", str(token)))
    assert "s3cret" not in str(caught.value)
    assert server.requests == []


def secret(tmp_path: Path) -> SecretRef:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    return SecretRef("file", str(token))


def test_the_token_goes_to_the_host_that_is_named_and_to_no_other_source(
    tmp_path: Path, server: httpd.Server
) -> None:
    server.always[NAME] = httpd.status(404)
    with httpd.Server({NAME: BODY}) as hub:
        sources, token = (server.url, hub.url), secret(tmp_path)
        fetch(tmp_path / "m", *sources, token=token, token_for=f"{hub.url}/acme/tiny")
        assert "authorization" not in server.requests[0].headers
        assert hub.requests[0].headers["authorization"] == "Bearer s3cret"


def test_a_token_for_one_of_several_hosts_wants_it_named(
    tmp_path: Path, server: httpd.Server
) -> None:
    with httpd.Server({NAME: BODY}) as other:
        with pytest.raises(OperatorError, match="one token and several hosts") as caught:
            fetch(tmp_path / "m", server.url, other.url, token=secret(tmp_path))
        assert "--token-for" in str(caught.value)
        assert server.requests == other.requests == []


def test_a_token_is_not_sent_in_the_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ("--source", "http://mirror.invalid/tiny", "--token", f"file:{secret(tmp_path).name}")
    message = wrong_input(tmp_path, capsys, *sources)
    assert "the token would go in the clear to http://mirror.invalid: use https" in message
    message = wrong_input(tmp_path, capsys, *sources, "--token-for", "https://mirror.invalid")
    assert "is on none of the sources' hosts: http://mirror.invalid" in message
    message = wrong_input(tmp_path, capsys, "--token-for", "https://mirror.invalid")
    assert message == "--token-for goes with --token\n"


def test_a_token_may_come_from_the_environment(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_TOKEN", "s3cret")
    manifest = write_manifest(tmp_path, {NAME: BODY}, server.url)
    arguments = [str(manifest), str(tmp_path / "m"), "--token", "env:TINY_TOKEN"]
    assert hostcli.main(["fetch", *arguments]) == 0
    assert server.requests[0].headers["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("status", "sent", "said"),
    [
        (401, False, "401 Unauthorized: needs a token, none was sent: --token env:NAME or file:"),
        (401, True, "401 Unauthorized: the token was refused: is it expired or mistyped?"),
        (403, False, "403 Forbidden: no access without a token"),
        (403, True, "403 Forbidden: the token has no access"),
        (407, False, "407 Proxy Authentication Required: check the proxy's login"),
    ],
)
def test_a_refused_login_says_whether_a_token_was_sent(
    tmp_path: Path, server: httpd.Server, status: int, sent: bool, said: str
) -> None:
    server.always[NAME] = httpd.status(status)
    token = secret(tmp_path) if sent else None
    assert said in failure(tmp_path / "m", server.url, token=token)


def test_a_missing_ca_bundle_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"--ca-bundle .*nowhere\.pem: cannot be read: No such"):
        fetch(tmp_path, "https://127.0.0.1:1", ca_bundle=tmp_path / "nowhere.pem")


def test_a_sites_own_authority_needs_its_bundle(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    with httpd.Server({NAME: BODY}, tls=certificate) as secure:
        url = secure.url.replace("127.0.0.1", "localhost")
        message = failure(tmp_path / "m", url)
        assert "TLS: self-signed certificate" in message
        assert "--ca-bundle" in message
        fetch(tmp_path / "m", url, ca_bundle=certificate[0])
    assert (tmp_path / "m" / NAME).read_bytes() == BODY


def wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that refuses a command line, with exit code 2 and before any request."""
    manifest = write_manifest(tmp_path, {NAME: BODY}, "https://127.0.0.1:1")
    assert hostcli.main(["fetch", str(manifest), str(tmp_path / "m"), *arguments]) == 2
    shown = capsys.readouterr()
    assert "next try" not in shown.out
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err.removeprefix("error: ")


@pytest.mark.parametrize(
    "proxy",
    [
        "http://[::1",
        "http://",
        "socks5://127.0.0.1:1",
        "http://a:hunter2@127.0.0.1:99999",
        "notaurl",
        "http://a..b",
        "http://a:hunter2@h:x",
        "http://a:hunter2\u2100@h",
    ],
)
def test_a_proxy_that_is_none_is_the_operators_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proxy: str
) -> None:
    message = wrong_input(tmp_path, capsys, "--proxy", proxy)
    assert message.startswith("--proxy: ")
    assert "http://[USER:PASSWORD@]HOST[:PORT]" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
@pytest.mark.parametrize("proxy", ["http://[bad", "socks5://127.0.0.1:1", "proxy.site:99999"])
def test_a_proxy_of_the_environment_that_is_none_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    proxy: str,
) -> None:
    monkeypatch.setenv(name, proxy)
    assert wrong_input(tmp_path, capsys).startswith(f"{name.lower()}: ")


def test_a_proxy_of_the_environment_for_others_does_not_matter(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://[bad")
    fetch(tmp_path / "a", server.url)
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fetch(tmp_path / "b", server.url)


def test_a_proxy_of_the_environment_may_be_named_without_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpd.Server({f"http://origin.invalid/{NAME}": BODY}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
        fetch(tmp_path, "http://origin.invalid")


@pytest.mark.parametrize(
    "source",
    ["http://h:99999/", "http://a..b/", "http://[::1", "http://" + "a" * 64, "file:///tmp/%00x"],
)
def test_a_source_that_is_none_is_the_operators_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert wrong_input(tmp_path, capsys, "--source", source).startswith(f"source '{source}': ")


@pytest.mark.parametrize("content", [b"", b"garbage", None])
@pytest.mark.parametrize("named_by", ["--ca-bundle", "REQUESTS_CA_BUNDLE"])
def test_a_bundle_that_holds_no_authority_is_the_operators_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    named_by: str,
) -> None:
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_bytes(content)
    arguments = [named_by, str(bundle)] if named_by == "--ca-bundle" else []
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    message = wrong_input(tmp_path, capsys, *arguments)
    assert message.startswith(f"{named_by} {bundle}: ")


def test_a_token_that_no_header_can_carry_is_the_operators_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("geheim→")
    token.chmod(0o600)
    message = wrong_input(tmp_path, capsys, "--token", f"file:{token}")
    assert "one line of printable ASCII" in message
    assert "geheim" not in message


def test_whatever_ends_the_reading_of_a_share_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(BODY)

    def broken(self: origin._Reading, stream: io.FileIO) -> None:
        raise ValueError("surprise")

    monkeypatch.setattr(origin._Reading, "_read", broken)
    with pytest.raises(ValueError, match="surprise"):
        fetch(tmp_path / "m", tmp_path.as_uri())


# --- disks and locks ----------------------------------------------------------------------------


def test_too_little_space_is_said_before_the_first_byte(
    tmp_path: Path, server: httpd.Server
) -> None:
    message = failure(tmp_path, server.url, margin_bytes=1 << 60)
    assert "not enough space: 1152921.5 TB needed (512.0 kB of files" in message
    assert " free: " in message
    assert server.requests == []


def test_space_is_needed_only_for_what_is_missing(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, server, 500_000)
    usage = shutil.disk_usage(tmp_path)._replace(free=len(BODY) - 500_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    fetch(tmp_path, server.url)


def test_the_new_model_must_fit_beside_all_that_is_there(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    fetch(old, server.url)
    free = len(BODY) + 1000
    usage = shutil.disk_usage(tmp_path)._replace(free=free - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    server.requests.clear()
    assert "not enough space" in failure(tmp_path / "new", server.url, margin_bytes=1000)
    assert server.requests == []
    assert (old / NAME).read_bytes() == BODY
    usage = usage._replace(free=free)
    fetch(tmp_path / "new", server.url, margin_bytes=1000)


def test_holes_in_a_partial_file_are_not_taken_for_bytes(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".partial").mkdir()
    os.truncate(os.open(tmp_path / ".partial" / NAME, os.O_WRONLY | os.O_CREAT), len(BODY))
    usage = shutil.disk_usage(tmp_path)._replace(free=len(BODY) - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "not enough space" in failure(tmp_path, server.url)


def test_a_full_disk_is_one_line(
    tmp_path: Path, server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full gives the kernel's own ENOSPC."""
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr(Partial, "_open", lambda self: os.dup(full))
    message = failure(tmp_path, server.url)
    os.close(full)
    assert "the disk is full: free some space and run again" in message
    assert len(server.requests) == 1


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckFailed, match="Not a directory"):
        fetch(tmp_path / "file" / "m", "http://127.0.0.1:1")


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("")
    with pytest.raises(OperatorError, match=r"file\.json: is no directory") as caught:
        fetch(tmp_path / "file.json", "http://127.0.0.1:1")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("there", [None, OTHER])
@pytest.mark.parametrize("link", ["sub", ".partial", ".quarantine", ".partial-origin"])
def test_nothing_is_written_through_a_link(
    tmp_path: Path, server: httpd.Server, link: str, there: bytes | None
) -> None:
    files = {"sub/a.bin": BODY}
    server.files = files
    directory, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    (directory / link).symlink_to(elsewhere)
    if there is not None:
        (directory / "sub").mkdir(exist_ok=True)
        (directory / "sub/a.bin").write_bytes(there)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(CheckFailed, match=rf"m/{link}: is a symbolic link"):
        fetch(directory, server.url, files=files)
    assert sorted(elsewhere.rglob("*")) == before
    assert server.requests == []


@pytest.mark.parametrize(
    "validator",
    ['"→"', "5", "[1]", r'"a\nb"', "[" * 100_000],
)
def test_a_damaged_note_of_where_bytes_came_from_costs_no_source(
    tmp_path: Path, server: httpd.Server, validator: str
) -> None:
    interrupted(tmp_path, server, 100_000)
    text = f'{{"sha256": "{sha(BODY)}", "source": "{server.url}"'
    text += f', "validator": {validator}}}'
    (tmp_path / ".partial-origin" / NAME).write_text(text)
    fetch(tmp_path, server.url, retries=0)
    assert len(server.requests) == 1
    assert "if-range" not in server.requests[0].headers


def test_two_fetches_into_one_directory_exclude_each_other(
    tmp_path: Path, server: httpd.Server
) -> None:
    with directory_lock(tmp_path):
        message = failure(tmp_path, server.url)
    assert f"process {os.getpid()} fetches into it" in message
    fetch(tmp_path, server.url)


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path, server: httpd.Server) -> None:
    code = (
        "import os, signal, sys, pathlib; from fp8fleet.fetch import directory_lock\n"
        "with directory_lock(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False)
    assert (tmp_path / ".fp8fleet-lock").read_text() != ""
    fetch(tmp_path, server.url)


def test_the_first_lost_file_ends_the_run_and_names_it(
    tmp_path: Path, server: httpd.Server
) -> None:
    files = {NAME: BODY, "lost.bin": b"lost"}
    with pytest.raises(CheckFailed, match=r"lost\.bin: no source has the expected file"):
        fetch(tmp_path, server.url, files=files)


# --- verify -------------------------------------------------------------------------------------


def codes(manifest: Manifest, directory: Path, full: bool = False) -> dict[str, str]:
    return {finding.file: finding.code for finding in verify(manifest, directory, full)}


def test_verify_tells_missing_short_and_wrong_files_apart(tmp_path: Path) -> None:
    files = {"gone": b"a", "short": b"abc", "wrong": b"abc", "right": b"abc", "directory": b"a"}
    manifest = manifest_of(files)
    (tmp_path / "short").write_bytes(b"ab")
    (tmp_path / "wrong").write_bytes(b"abd")
    (tmp_path / "right").write_bytes(b"abc")
    (tmp_path / "directory").mkdir()
    assert codes(manifest, tmp_path) == {
        "gone": "missing",
        "short": "size",
        "wrong": "digest",
        "directory": "not-a-file",
    }


def test_every_core_hashes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number}.bin": b"%d" % number for number in range(4)}
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    meeting = threading.Barrier(4, timeout=20)
    hash_file = check.hash_file

    def together(*arguments: Any) -> str:
        meeting.wait()
        return hash_file(*arguments)

    monkeypatch.setattr(check, "hash_file", together)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert verify(manifest_of(files), tmp_path) == []


def test_a_check_that_finds_all_in_place_loads_no_web_client_and_no_bars(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {NAME: BODY}, "http://127.0.0.1:1")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / NAME).write_bytes(BODY)
    code = (
        "import sys; from fp8fleet import hostcli\n"
        "for command in ('verify', 'fetch'): assert hostcli.main([command, *sys.argv[1:]]) == 0\n"
        "print({'requests', 'rich', 'libtorrent'} & set(sys.modules) or 'none')"
    )
    command = [sys.executable, "-c", code, str(manifest), str(tmp_path / "m")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "none"


def test_verify_reports_what_the_manifest_does_not_name(tmp_path: Path) -> None:
    manifest = manifest_of({"a": b"a"})
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/more.safetensors").write_bytes(b"x")
    (tmp_path / "README.md").write_bytes(b"x")
    (tmp_path / ".quarantine").mkdir()
    (tmp_path / ".quarantine/old.safetensors").write_bytes(b"x")
    found = verify(manifest, tmp_path)
    assert [(finding.file, finding.severity) for finding in found] == [
        ("sub/more.safetensors", "error"),
        ("README.md", "warning"),
    ]


def test_a_stray_shard_beside_an_index_is_not_loaded_and_so_a_warning(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}).encode()
    files = {"model.safetensors.index.json": index, "a.safetensors": b"a"}
    for name in (*files, "b.safetensors", "consolidated.safetensors", "stray.safetensors"):
        (tmp_path / name).write_bytes(files.get(name, b"x"))
    found = {finding.file: finding for finding in verify(manifest_of(files), tmp_path)}
    assert {name: finding.severity for name, finding in found.items()} == {
        "b.safetensors": "error",
        "consolidated.safetensors": "error",
        "stray.safetensors": "warning",
    }
    assert "nor in model.safetensors.index.json: it is not loaded" in (
        found["stray.safetensors"].message
    )


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": []}', b"[" * 100_000])
def test_a_stray_shard_beside_an_index_that_is_none_would_be_loaded(
    tmp_path: Path, index: bytes
) -> None:
    files = {"model.safetensors.index.json": index}
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    (tmp_path / "stray.safetensors").write_bytes(b"x")
    (finding,) = verify(manifest_of(files), tmp_path)
    assert finding.severity == "error"


def test_verify_says_what_it_may_not_look_into() -> None:
    """Its files may be readable by name and others there all the same."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        directory.chmod(0o711)
        (directory / "sub").mkdir()
        for name in ("a", "evil.safetensors", "sub/b"):
            (directory / name).write_bytes(b"a")
        (directory / "sub").chmod(0o311)
        directory.chmod(0o311)
        with nobody():
            found = verify(manifest_of({"a": b"a", "sub/b": b"a"}), directory)
        assert [(finding.file, finding.code, finding.severity) for finding in found] == [
            (".", "unreadable", "error")
        ]
        directory.chmod(0o755)
        (directory / "evil.safetensors").unlink()
        with nobody():
            found = verify(manifest_of({"a": b"a", "sub/b": b"a"}), directory)
        assert [(finding.file, finding.code) for finding in found] == [("sub", "unreadable")]
        (directory / "sub").chmod(0o755)


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's rights, where the tests run with them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_verify_says_that_it_does_not_look_behind_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/evil.safetensors").write_bytes(b"x")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/a").write_bytes(b"a")
    (tmp_path / "m/sub").symlink_to(tmp_path / "elsewhere")
    assert codes(manifest_of({"a": b"a"}), tmp_path / "m") == {"sub": "not-a-file"}


@pytest.mark.parametrize("name", [".fp8fleet-stamp.json.new", ".fp8fleet-inspected.new"])
def test_what_a_kill_left_of_our_own_is_no_extra_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / name).write_bytes(b"{")
    assert codes(manifest_of({"a": b"a"}), tmp_path) == {}


def test_a_file_changed_behind_the_stamp_is_hashed_again(
    tmp_path: Path, server: httpd.Server
) -> None:
    fetch(tmp_path, server.url)
    manifest = manifest_of({NAME: BODY})
    assert verify(manifest, tmp_path) == []
    (tmp_path / NAME).write_bytes(OTHER)
    assert codes(manifest, tmp_path) == {NAME: "digest"}


def test_full_finds_damage_that_metadata_does_not_show(
    tmp_path: Path, server: httpd.Server
) -> None:
    fetch(tmp_path, server.url)
    path = tmp_path / NAME
    before = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"damaged")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    manifest = manifest_of({NAME: BODY})
    assert codes(manifest, tmp_path) == {}
    assert codes(manifest, tmp_path, full=True) == {NAME: "digest"}


def test_verify_stamps_what_it_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of({NAME: BODY})
    (tmp_path / NAME).write_bytes(BODY)
    assert verify(manifest, tmp_path) == []
    monkeypatch.setattr(check, "hash_file", lambda *_: pytest.fail("hashed"))
    assert verify(manifest, tmp_path) == []
    stamp = json.loads((tmp_path / ".fp8fleet-stamp.json").read_text())
    assert stamp["manifest"] == manifest.digest


def test_a_stamp_of_a_directory_that_is_not_whole_names_no_manifest(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(BODY)
    verify(manifest_of({NAME: BODY, "gone": b"x"}), tmp_path)
    assert json.loads((tmp_path / ".fp8fleet-stamp.json").read_text())["manifest"] is None


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"a": 1}}', "[" * 100_000])
def test_a_damaged_stamp_only_costs_hashing(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_bytes(BODY)
    (tmp_path / ".fp8fleet-stamp.json").write_text(text)
    assert verify(manifest_of({NAME: BODY}), tmp_path) == []


def test_the_same_file_under_another_manifest_is_hashed_again(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(BODY)
    assert verify(manifest_of({NAME: BODY}), tmp_path) == []
    assert codes(manifest_of({NAME: OTHER}), tmp_path) == {NAME: "digest"}


# --- progress -----------------------------------------------------------------------------------


def test_bytes_are_shown_in_decimal_units() -> None:
    shown = [human_bytes(count) for count in (0, 999, 1000, 4_900_000_000, 2_000_000_000_000)]
    assert shown == ["0 B", "999 B", "1.0 kB", "4.9 GB", "2.0 TB"]
    assert human_bytes(10**400) == "over 1000000000 TB"


def test_plain_progress_prints_while_it_waits_and_at_the_end() -> None:
    stream = io.StringIO()
    with PlainReporter(stream, interval_s=0.02) as reporter:
        reporter.begin("model.safetensors", 4_900_000_000, 0)
        reporter.advance("model.safetensors", 1_200_000_000)
        wait_for(lambda: stream.getvalue().count("\n") >= 2)
        reporter.end("model.safetensors", "verified")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("model.safetensors 1.2 GB of 4.9 GB (")
    assert lines[1] == "model.safetensors 1.2 GB of 4.9 GB (0 B/s)"
    assert lines[-1].endswith("/s), verified")


def test_bars_on_a_terminal_end_with_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    with RichReporter() as reporter:
        reporter.begin("a[b].bin", 10, 0)
        reporter.advance("a[b].bin", 5)
        reporter.begin("a[b].bin", 10, 0)
        reporter.note("starts over")
        reporter.end("a[b].bin", "verified")
    shown = capsys.readouterr().out
    assert "starts over" in shown
    assert "a[b].bin verified" in shown


# --- the command line ---------------------------------------------------------------------------


def test_the_command_fetches_and_then_verifies(
    tmp_path: Path, server: httpd.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_manifest(tmp_path, {NAME: BODY}, server.url)
    arguments = [str(manifest), str(tmp_path / "m")]
    assert hostcli.main(["fetch", *arguments]) == 0
    assert f"{NAME} 512.0 kB of 512.0 kB (" in capsys.readouterr().out
    assert (tmp_path / "m" / NAME).stat().st_mode & 0o777 == 0o644
    assert hostcli.main(["verify", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    (tmp_path / "m" / "b.safetensors").write_bytes(b"x")
    assert hostcli.main(["fetch", *arguments]) == 1
    assert hostcli.main(["verify", *arguments, "--full", "--json"]) == 1
    assert '"code": "extra"' in capsys.readouterr().out


def test_verify_says_that_all_is_well_and_how_much_it_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, directory = write_manifest(tmp_path, {"a": b"a", "b": b"b"}), tmp_path / "m"
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).write_bytes(name.encode())
    for more, hashed in (([], 2), ([], 0), (["--full"], 2)):
        assert hostcli.main(["verify", str(manifest), str(directory), *more]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[-1] == f"{directory}: whole, 2 files, {hashed} hashed"
    (directory / "b").unlink()
    assert hostcli.main(["verify", str(manifest), str(directory)]) == 1
    assert "whole" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["verify"], ["manifest", "torrent"]])
def test_a_mistyped_directory_is_one_line_and_not_every_file_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    manifest = write_manifest(tmp_path, {"a": b"a", "b": b"b"})
    assert hostcli.main([*command, str(manifest), str(tmp_path / "nowhere")]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert f"{tmp_path}/nowhere: no such directory" in shown.err
    assert hostcli.main([*command, str(tmp_path), str(manifest)]) == 2
    assert f"{tmp_path}: is a directory, expected its manifest.toml" in capsys.readouterr().err


def test_the_command_says_errors_in_one_line_with_their_exit_code(
    tmp_path: Path, server: httpd.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hostcli.main(["verify", str(tmp_path / "none.toml"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    manifest = write_manifest(tmp_path, {NAME: OTHER}, server.url)
    assert hostcli.main(["fetch", str(manifest), str(tmp_path / "m")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: model.safetensors: no source has the expected file")
    assert error.count("\n") == 1


def test_damage_that_only_a_full_check_sees_is_fetched_again(tmp_path: Path) -> None:
    """A flipped byte on the disk leaves size, time and inode as they were."""
    source, directory = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    content = bytes(range(256)) * 64
    (source / "a.safetensors").write_bytes(content)
    manifest = manifest_of({"a.safetensors": content}, f"file://{source}")
    fetching.fetch(manifest, directory)
    file = directory / "a.safetensors"
    before = file.stat()
    with file.open("r+b") as damaged:
        damaged.write(b"\1")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verify(manifest, directory) == []
    assert [finding.code for finding in verify(manifest, directory, full=True)] == ["digest"]
    assert [finding.code for finding in verify(manifest, directory)] == ["digest"]
    fetching.fetch(manifest, directory)
    assert file.read_bytes() == content
    assert verify(manifest, directory, full=True) == []
