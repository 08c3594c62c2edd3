"""Who gets a bearer token: one host, by https or because the operator says so."""

from __future__ import annotations

import pytest

from fp8fleet.tokens import Origin, token_origin

HUB = "https://huggingface.co/acme/tiny/resolve/1"
MIRROR = "http://mirror.example:8080/tiny"


@pytest.mark.parametrize(
    ("urls", "named", "origin"),
    [
        ([HUB], None, ("https", "huggingface.co", 443)),
        (
            [HUB, "https://HuggingFace.co:443/other", "file:///srv"],
            None,
            ("https", "huggingface.co", 443),
        ),
        (["http://127.0.0.1:8080/x"], None, ("http", "127.0.0.1", 8080)),
        (["http://localhost/x"], None, ("http", "localhost", 80)),
        (["http://[::1]:81"], None, ("http", "::1", 81)),
        ([MIRROR, HUB], HUB, ("https", "huggingface.co", 443)),
        ([MIRROR, HUB], "http://mirror.example:8080", ("http", "mirror.example", 8080)),
        (["file:///srv"], None, None),
    ],
)
def test_one_host_gets_it(urls: list[str], named: str | None, origin: Origin | None) -> None:
    assert token_origin(urls, named, "--token-for") == origin


@pytest.mark.parametrize(
    ("urls", "named", "said"),
    [
        ([MIRROR], None, "in the clear to http://mirror.example:8080"),
        (["http://127.0.0.1.evil.example"], None, "in the clear"),
        ([MIRROR, HUB], None, "several hosts (http://mirror.example:8080 https://huggingface.co)"),
        (["http://h/x", "https://h/x"], None, "several hosts"),
        ([HUB], "https://hf.example", "on none of the sources' hosts: https://huggingface.co"),
        ([HUB], "http://huggingface.co", "on none of the sources' hosts"),
        (["file:///srv"], "file:///srv", "on none of the sources' hosts: none of the web"),
        ([HUB], "huggingface.co", "expected http://HOST/"),
    ],
)
def test_nobody_else_gets_it(urls: list[str], named: str | None, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        token_origin(urls, named, "--token-for")
    assert said in str(caught.value)
