"""What a manifest may say, and what one line says about a bad one."""

from pathlib import Path

import pytest

from fp8fleet.errors import OperatorError
from fp8fleet.manifest import load_manifest

DIGEST = "ab" * 32
HEAD = 'name = "tiny"\nrevision = "r1"\nsources = ["https://mirror.example/tiny/"]\n'


def entry(path: str = "model.safetensors", size: str = "12", sha256: str = DIGEST) -> str:
    return f'[[files]]\npath = "{path}"\nsize = {size}\nsha256 = "{sha256}"\n'


def refusal(tmp_path: Path, text: str) -> str:
    """The line that refuses ``text``, without the directory."""
    path = tmp_path / "manifest.toml"
    path.write_text(text)
    with pytest.raises(OperatorError) as caught:
        load_manifest(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_a_good_manifest_is_read_and_its_digests_become_lower_case(tmp_path: Path) -> None:
    path = tmp_path / "manifest.toml"
    path.write_text(HEAD + entry(sha256=DIGEST.upper()) + entry("sub/config.json", "3"))
    manifest = load_manifest(path)
    assert manifest.files[0].sha256 == DIGEST
    assert manifest.total_bytes == 15
    assert manifest.sources == ("https://mirror.example/tiny",)
    assert manifest.quantization is None


def test_the_digest_names_the_content_and_not_where_it_comes_from(tmp_path: Path) -> None:
    digests = []
    for text in (
        HEAD + entry() + entry("b"),
        HEAD.replace("mirror", "other") + entry("b") + entry(),
        HEAD + entry() + entry("b", "13"),
    ):
        path = tmp_path / "manifest.toml"
        path.write_text(text)
        digests.append(load_manifest(path).digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_digest_of_66_digits_is_refused_with_its_length_and_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, HEAD + entry() + entry("b", sha256="ab" * 33))
    assert message.startswith("manifest.toml:11: files[1].sha256 has 66 digits, expected 64")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + entry(sha256="xy" * 32), "manifest.toml:7: files[0].sha256 is not hexadecimal"),
        (HEAD + entry("/etc/passwd"), "manifest.toml:5: files[0].path '/etc/passwd' is absolute"),
        (HEAD + entry("a/../../b"), "manifest.toml:5: files[0].path 'a/../../b' leaves"),
        (HEAD + entry(""), "manifest.toml:5: files[0].path is empty"),
        (HEAD + entry("a//b"), "has an empty or '.' component"),
        (HEAD + entry("./b"), "has an empty or '.' component"),
        (HEAD + entry(".partial/b"), "the name .partial is reserved"),
        (HEAD + entry(size="-1"), "manifest.toml:6: files[0].size is negative"),
        (HEAD + entry(size=str(2**63)), "manifest.toml:6: files[0].size is larger than any file"),
        (HEAD + entry(size="9" * 400), "manifest.toml:6: files[0].size is larger than any file"),
        (HEAD + entry(size="9" * 5000), "manifest.toml: not TOML:"),
        (HEAD + "x = " + "[" * 5000, "manifest.toml: not TOML: nested too deep"),
        (HEAD.replace("mirror.example", "a..b") + entry(), "'a..b' has an empty or too long part"),
        (HEAD.replace("mirror.example", "h:99999") + entry(), "its port is not one of 1 to 65535"),
        (HEAD + entry(size='"12"'), "manifest.toml:6: files[0].size input should be"),
        (HEAD + entry() + entry(), "manifest.toml:9: files[1]: path 'model.safetensors' is a dup"),
        (HEAD + entry("a") + entry("a/b"), "manifest.toml:5: files[0]: path 'a' is also the dir"),
        (HEAD + "files = []\n", "files is empty, expected at least one"),
        (HEAD, "files is missing"),
        (HEAD + 'colour = "red"\n' + entry(), "manifest.toml:4: colour is an unknown key"),
        (HEAD + entry() + "md5 = 1\n", "manifest.toml:8: files[0].md5 is an unknown key"),
        (HEAD + "[[files]\n", "manifest.toml: not TOML:"),
        (HEAD.replace("tiny", "../x") + entry(), "manifest.toml:1: name it becomes a directory"),
        (HEAD.replace("r1", "a/b") + entry(), "manifest.toml:2: revision it becomes a directory"),
        (HEAD.replace("https://", "ftp://") + entry(), "manifest.toml:3: sources[0]"),
        (HEAD.replace("/tiny/", "/tiny?x=1") + entry(), "without '?' and '#'"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_several_errors_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, HEAD + entry("/a", "-1", "ab"))
    assert message.endswith("(and 2 more errors)")


def test_a_mistyped_key_is_named_before_the_key_that_it_leaves_missing(tmp_path: Path) -> None:
    message = refusal(tmp_path, HEAD + entry().replace("size", "sise"))
    assert message == (
        "manifest.toml:6: files[0].sise is an unknown key: remove it or correct its name"
        " (and 1 more error)"
    )


def test_a_login_in_a_source_is_refused_and_not_repeated(tmp_path: Path) -> None:
    text = HEAD.replace("mirror", "joe:hunter2@mirror") + entry()
    message = refusal(tmp_path, text)
    assert "must not hold a login" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("path", ["模型", "modèle", "a b", "a'b"])
def test_a_source_is_of_the_characters_of_a_url(tmp_path: Path, path: str) -> None:
    message = refusal(tmp_path, HEAD.replace("mirror", f"mirror/{path}/") + entry())
    assert "a source URL must not hold spaces, quotes, control characters or letters" in message
    assert "write those as %XX" in message


def test_a_missing_manifest_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"nowhere\.toml: no such manifest"):
        load_manifest(tmp_path / "nowhere.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(OperatorError, match="not UTF-8"):
        load_manifest(binary)
