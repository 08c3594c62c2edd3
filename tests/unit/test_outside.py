"""What comes from outside is read, or refused in one way."""

import pytest

from fp8fleet.outside import check_web_address, load_json, plain, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("0" * 19, 0),
        ("9" * 19, 10**19 - 1),
        ("9" * 20, None),
        ("9" * 5000, None),
        ("-1", None),
        ("1.0", None),
        ("1\n", None),
        (" 1", None),
        ("²", None),
        ("\u0661", None),
        ("", None),
        (None, None),
    ],
)
def test_a_number_has_few_digits_and_nothing_else(text: str | None, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000 + "x", b"\xff", ""])
def test_json_that_cannot_be_read_is_no_value(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_json(text)


def test_a_line_stays_a_line_and_its_letters_letters() -> None:
    text = "模型 é \x1b[31m\nerror: fake\r\x00\ud800\u202e\x85"
    assert plain(text) == r"模型 é \x1b[31m\nerror: fake\r\x00\ud800\u202e\x85"


@pytest.mark.parametrize(
    "value",
    ["http://h", "https://[::1]:8080/x", "http://a_b.c.:1", "http://例え.jp/", "http://u:p@h:3128"],
)
def test_an_address_that_can_exist_is_one(value: str) -> None:
    check_web_address(value)


@pytest.mark.parametrize("value", ["http://h:0", "http://h:-1", "http://h:65536", "//h", "h:80"])
def test_an_address_that_cannot_exist_is_none(value: str) -> None:
    with pytest.raises(ValueError, match=r"its port|expected http"):
        check_web_address(value)
