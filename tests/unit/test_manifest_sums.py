"""Lists of digests as `sha256sum` prints them, and what one line says about a bad one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fp8fleet.errors import OperatorError
from fp8fleet.sums import parse_sums

DIGEST = "ab" * 32
OTHER = "cd" * 32


def refusal(text: str) -> str:
    with pytest.raises(OperatorError) as caught:
        parse_sums(text, "SHA256SUMS")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"{DIGEST}  a.json\n{OTHER}  sub/b c.json\n",
        f"{DIGEST} *a.json\n{OTHER} *sub/b c.json\n",
        f"{DIGEST.upper()}  a.json\n{OTHER.upper()}  sub/b c.json\n",
        f"{DIGEST}  a.json\r\n{OTHER}  sub/b c.json\r\n",
        f"\ufeff# a comment\n\n{DIGEST}  a.json\n{OTHER}  sub/b c.json",
        f"{DIGEST}  ./a.json\n{OTHER}  ./sub/b c.json\n",
        f"\\{DIGEST}  a.json\n{OTHER}  sub/b c.json\n",
    ],
    ids=["text", "binary", "upper case", "CRLF", "comments", "dot", "escaped"],
)
def test_every_form_of_sha256sum_is_read(text: str) -> None:
    assert parse_sums(text, "SHA256SUMS") == {"a.json": DIGEST, "sub/b c.json": OTHER}


def test_what_sha256sum_really_prints_is_read(tmp_path: Path) -> None:
    (tmp_path / "a b.json").write_text("{}")
    printed = [
        subprocess.run(
            ["sha256sum", *options, "a b.json"], cwd=tmp_path, capture_output=True, text=True
        ).stdout
        for options in ([], ["--binary"])
    ]
    assert printed[0] != printed[1]
    sums = [parse_sums(text, "x") for text in printed]
    assert sums[0] == sums[1]
    assert list(sums[0]) == ["a b.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{DIGEST}  a\n{DIGEST}ab  b\n", "SHA256SUMS:2: the digest of b has 66 digits, expected"),
        (f"{DIGEST[:-1]}  a\n", "SHA256SUMS:1: the digest of a has 63 digits"),
        (f"{'xy' * 32}  a\n", "SHA256SUMS:1: the digest of a is not hexadecimal"),
        (f"{DIGEST}  a\n\n{OTHER}  a\n", "SHA256SUMS:3: 'a' stands twice"),
        (f"{DIGEST}  /etc/passwd\n", "SHA256SUMS:1: the path '/etc/passwd' is absolute"),
        (f"{DIGEST}  ../a\n", "SHA256SUMS:1: the path '../a' leaves the model directory"),
        (f"{DIGEST}  .partial/a\n", "the name .partial is reserved"),
        (f"\\{DIGEST}  a\\nb\n", "SHA256SUMS:1: the path holds a backslash or a control"),
        (f"\\{DIGEST}  a\\tb\n", "SHA256SUMS:1: '\\\\t' is not an escape of sha256sum"),
        (f"\\{DIGEST}  a\\\n", "SHA256SUMS:1: '\\\\' is not an escape of sha256sum"),
        (f"{DIGEST}\n", "SHA256SUMS:1: not a line of sha256sum"),
        (f"{DIGEST} a\n", "SHA256SUMS:1: not a line of sha256sum"),
        (f"SHA256 (a) = {DIGEST}\n", "SHA256SUMS:1: not a line of sha256sum"),
        ("<html>\n", "SHA256SUMS:1: not a line of sha256sum"),
        ("", "SHA256SUMS: no digests in it"),
        ("# nothing\n", "SHA256SUMS: no digests in it"),
    ],
)
def test_what_is_no_digest_of_a_file_is_refused_with_its_line(text: str, said: str) -> None:
    assert refusal(text).startswith(said) or said in refusal(text)
