"""`fp8fleet manifest create`: from a directory, digests, Hugging Face, a mirror, ModelScope."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model
from fleets import REPO
from hub import CHOSEN, COMMIT, MODEL, TOKEN, Hub, model_files, sums

from fp8fleet.checkpoint import inspect_directory
from fp8fleet.cli import main
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch import Reporter
from fp8fleet.headers import read_headers
from fp8fleet.manifest import Manifest, load_manifest
from fp8fleet.manifest_create import (
    Created,
    CreateOptions,
    NotServable,
    create_manifest,
    is_wanted,
)

STORED = ["config.json", "generation_config.json", "headers.json", "manifest.toml"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty project, no settings of the machine, no waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    names = ("HF_TOKEN", "HF_ENDPOINT", "MODELSCOPE_DOMAIN", "HTTP_PROXY", "http_proxy")
    for name in (*names, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fp8fleet.web.sleep", lambda seconds: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", server.url)
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the model's files."""
    return write(tmp_path / "weights", model_files())


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def create(**options: Any) -> Created:
    return create_manifest(CreateOptions(**{"name": "tiny", **options}), Reporter())


def refusal(kind: type[OperatorError] = CheckFailed, **options: Any) -> str:
    """The line that refuses to make the manifest; nothing is left of it."""
    with pytest.raises(OperatorError) as caught:
        create(**options)
    assert type(caught.value) is kind or (kind is CheckFailed and caught.value.exit_code == 1)
    message = str(caught.value)
    assert "\n" not in message
    assert not Path("models/tiny/manifest.toml").exists()
    assert not [*Path().glob("models/tiny/.*")]
    return message


def digests(manifest: Manifest) -> dict[str, str]:
    return {file.path: file.sha256 for file in manifest.files}


def expected(files: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(files[path]).hexdigest() for path in CHOSEN}


def assert_whole(created: Created, files: dict[str, bytes]) -> None:
    """Everything of the model is known and stands beside the manifest."""
    manifest = load_manifest(created.path)
    assert manifest == created.manifest
    assert digests(manifest) == expected(files)
    assert [file.size for file in manifest.files] == [len(files[path]) for path in CHOSEN]
    assert manifest.quantization == "compressed-tensors-fp8-block"
    folder = created.path.parent
    assert sorted(path.name for path in folder.iterdir()) == STORED
    for name in STORED[:2]:
        assert (folder / name).read_bytes() == files[name]
    headers = read_headers(folder / "headers.json")
    assert list(headers) == [path for path in CHOSEN if path.endswith(".safetensors")]
    assert [sorted(header.tensors) for header in headers.values()] == [
        sorted(part) for part in Model(Path()).parts()
    ]


def assert_only_ranges_of_shards(hub: Hub) -> None:
    shards = [
        asked
        for asked in hub.asked
        if asked.method == "GET" and asked.url.partition("?")[0].endswith(".safetensors")
    ]
    assert len(shards) > 2
    assert all("range" in asked.headers for asked in shards)


# from a directory


def test_a_directory_becomes_a_manifest_with_all_that_is_known(directory: Path) -> None:
    created = create(directory=directory, sources=("https://mirror.example/tiny/",))
    assert_whole(created, model_files())
    assert created.manifest.sources == ("https://mirror.example/tiny",)


def test_what_the_command_wrote_is_no_part_of_the_model(directory: Path) -> None:
    shutil.copytree(directory, "models/tiny")
    first = create(directory=Path("models/tiny"))
    texts = {name: (Path("models/tiny") / name).read_bytes() for name in STORED}
    second = create(directory=Path("models/tiny"), force=True)
    assert second.manifest == first.manifest
    assert {name: (Path("models/tiny") / name).read_bytes() for name in STORED} == texts


def test_the_same_files_give_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    files = model_files()
    other = write(tmp_path / "other", {path: files[path] for path in reversed(files)})
    texts = []
    for folder in (directory, other):
        create(directory=folder, force=True)
        texts.append({name: (Path("models/tiny") / name).read_bytes() for name in STORED})
    assert texts[0] == texts[1]


def test_the_revision_is_the_contents_unless_it_is_given(directory: Path) -> None:
    first = create(directory=directory).manifest.revision
    assert len(first) == 12
    (directory / "tokenizer.json").write_text("{}")
    assert create(directory=directory, force=True).manifest.revision != first
    assert create(directory=directory, force=True, revision="v2").manifest.revision == "v2"


def test_what_is_no_part_of_the_model_is_left_out_and_said(directory: Path) -> None:
    write(
        directory, {".git/config": b"", ".cache/x.json": b"{}", "a.lock": b"", "x.json.lock": b""}
    )
    created = create(directory=directory)
    assert [file.path for file in created.manifest.files] == CHOSEN
    (note,) = created.notes
    assert note.startswith("left out: .gitattributes, README.md, a.lock, logo.png")
    assert ".git/config" not in note


def test_a_link_out_of_the_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"{}")
    (directory / "extra.json").symlink_to(tmp_path / "blob")
    message = refusal(directory=directory)
    assert "extra.json: a symbolic link out of the directory" in message
    assert "cp -rL" in message


def test_a_link_out_that_is_not_wanted_does_not_matter(directory: Path, tmp_path: Path) -> None:
    (directory / "extra.png").symlink_to(tmp_path / "nowhere")
    assert_whole(create(directory=directory), model_files())


def test_a_link_within_the_directory_is_its_file(directory: Path) -> None:
    (directory / "config.json").rename(directory / "blob")
    (directory / "config.json").symlink_to("blob")
    assert_whole(create(directory=directory), model_files())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("nowhere"), "x.json: cannot be read: No such file"),
        (os.mkfifo, "x.json: is not a regular file"),
    ],
)
def test_what_is_not_a_file_is_refused(directory: Path, make: Any, said: str) -> None:
    make(directory / "x.json")
    assert said in refusal(directory=directory)


def test_a_linked_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    (directory / "more").symlink_to(tmp_path)
    message = refusal(OperatorError, directory=directory)
    assert "more: a symbolic link to a directory" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "model-00001-of-00002.safetensors: truncated: has"),
        (lambda content: content + b"\0", "with trailing bytes: has"),
        (lambda content: b"<html>", "is an HTML page"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (lambda content: b"", "is an empty file"),
    ],
)
def test_a_broken_shard_gets_no_manifest(directory: Path, change: Any, said: str) -> None:
    path = directory / "model-00001-of-00002.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert said in refusal(directory=directory)


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddler(Reporter):
        def advance(self, label: str, count: int) -> None:
            if label == "hashing tokenizer.json":
                (directory / "tokenizer.json").write_text("changed")

    with pytest.raises(CheckFailed, match=r"tokenizer\.json: changed while it was read"):
        create_manifest(CreateOptions("tiny", directory=directory), Meddler())


def test_hashing_runs_on_several_cores(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=20)
    met = []

    class Meeting(Reporter):
        def advance(self, label: str, count: int) -> None:
            if label.endswith(".safetensors") and label not in met:
                met.append(label)
                both.wait()

    create_manifest(CreateOptions("tiny", directory=directory), Meeting())
    assert len(met) == 2


def test_an_index_that_names_a_missing_shard_is_refused(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()
    message = refusal(directory=directory)
    assert "model.safetensors.index.json: names 1 shards that are not there" in message
    assert "model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize("text", ["{}", '{"weight_map": 1}', "[]", "{"])
def test_an_index_that_is_none_is_refused(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: " in refusal(directory=directory)


def test_a_directory_without_config_json_is_no_model(directory: Path) -> None:
    (directory / "config.json").unlink()
    message = refusal(directory=directory)
    assert "no config.json among its 12 files" in message


@pytest.mark.parametrize(
    ("text", "said"), [("{", "config.json: is not JSON"), ("[]", "is not a JSON object")]
)
def test_a_config_json_that_says_nothing_is_refused(directory: Path, text: str, said: str) -> None:
    (directory / "config.json").write_text(text)
    assert said in refusal(directory=directory)


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "gguf", {"config.json": b"{}", "model.gguf": b"GGUF"})
    assert refused_for(directory=folder, include=("*.gguf",)) >= {"no-weights"}


# what no host would serve


def refused_for(**options: Any) -> set[str]:
    """The codes of the errors for which nothing is written."""
    with pytest.raises(NotServable) as caught:
        create(**options)
    assert caught.value.exit_code == 1
    assert not Path("models/tiny").exists()
    return {finding.code for finding in caught.value.findings if finding.severity == "error"}


def broken(tmp_path: Path, change: Callable[[Model], None]) -> Path:
    model = Model(tmp_path / "weights", "deepseek")
    change(model)
    return model.write()


def without_scales(model: Model) -> None:
    model.tensors = {n: s for n, s in model.tensors.items() if not n.endswith("_scale_inv")}


def without_one_scale(model: Model) -> None:
    del model.tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def without_quantization(model: Model) -> None:
    del model.config["quantization_config"]


def as_the_guide_has_it(model: Model) -> None:
    model.config["quantization_config"] = {"quant_method": "fp8", "block_size": 128}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_scales, "scale-missing"),
        (without_one_scale, "scale-missing"),
        (without_quantization, "quantization-missing"),
        (as_the_guide_has_it, "quantization-config"),
    ],
)
def test_what_the_inspection_refuses_gets_no_manifest(
    tmp_path: Path, change: Callable[[Model], None], code: str
) -> None:
    assert code in refused_for(directory=broken(tmp_path, change))


def test_a_shard_that_only_the_others_numbers_tell_of_is_missed(tmp_path: Path) -> None:
    model = Model(tmp_path / "weights")
    model.indexed = False
    model.write()
    model.shard(2).unlink()
    assert "shard-missing" in refused_for(directory=model.directory)


def test_a_tensor_that_the_index_has_and_no_shard_is_missed(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["more.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(named))
    assert refused_for(directory=directory)


def test_a_hub_is_inspected_by_ranges_alone(hub: Hub) -> None:
    config = json.loads(hub.files["config.json"])
    del config["quantization_config"]
    hub.files["config.json"] = json.dumps(config).encode()
    assert "quantization-missing" in refused_for(hub=MODEL)
    assert_only_ranges_of_shards(hub)


def test_without_headers_only_config_json_is_inspected_and_that_is_said(hub: Hub) -> None:
    hub.ranges = False
    created = create(hub=MODEL)
    assert "only config.json was inspected: hosts will inspect the shards" in created.notes
    config = json.loads(hub.files["config.json"])
    config["quantization_config"] = {"quant_method": "fp8", "block_size": 128}
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(NotServable) as caught:
        create(hub=MODEL, force=True)
    assert {finding.code for finding in caught.value.findings} == {"quantization-config"}


def test_warnings_are_noted_and_stop_nothing(directory: Path) -> None:
    shutil.copy(
        directory / "model-00001-of-00002.safetensors", directory / "consolidated.safetensors"
    )
    notes = create(directory=directory).notes
    assert any(note.startswith("warning: ") and "[consolidated]" in note for note in notes)
    assert create(directory=directory, exclude=("consolidated*",), force=True).manifest


def test_the_quantization_of_modelopts_own_file_is_the_manifests(tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", model_files("none"))
    text = json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    (folder / "hf_quant_config.json").write_text(text)
    created = create(directory=folder)
    assert created.manifest.quantization == inspect_directory(folder).quantization != "none"


def test_the_command_says_each_finding_on_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--directory", str(broken(tmp_path, without_scales)))
    assert code == 1
    findings = [line for line in out.splitlines() if line.startswith("error: ")]
    assert findings
    assert all("[" in line for line in findings)
    assert err == (
        f"error: {tmp_path}/weights: {len(findings)} errors: not to be served,"
        " so no manifest is written\n"
    )


# where the command runs


def test_outside_a_checkout_nothing_is_written(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").unlink()
    message = refusal(OperatorError, directory=directory)
    assert f"{tmp_path}: is no checkout of this project" in message
    assert not Path("models").exists()
    Path("models").mkdir()
    assert create(directory=directory).path.exists()


@pytest.mark.parametrize("place", ["directory", "sums"])
def test_a_model_one_level_down_is_pointed_at(directory: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "all").mkdir()
    directory.rename(tmp_path / "all/tiny")
    named = {f"tiny/{path}": content for path, content in model_files().items()}
    (tmp_path / "SHA256SUMS").write_text(sums(named))
    options: dict[str, Any] = {"sums": "SHA256SUMS"} if place == "sums" else {}
    message = refusal(directory=tmp_path / "all", **options)
    assert "no config.json among its 13 files, but tiny/config.json: give tiny/ itself" in message


# which files


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("model.safetensors", True),
        ("sub/model.safetensors", True),
        ("tokenizer.model", True),
        ("tokenizer_config.json", True),
        ("qwen.tiktoken", True),
        ("merges.txt", True),
        ("chat_template.jinja", True),
        ("README.md", False),
        (".gitattributes", False),
        ("sub/.hidden.json", False),
        (".eval/result.json", False),
        ("original/params.json", False),
        ("model.pth", False),
        ("pytorch_model.bin", False),
        ("pytorch_model.bin.index.json", False),
        ("modeling.py", False),
        ("tokenizer_code.py", False),
        ("figure.png", False),
        ("a.json.lock", False),
    ],
)
def test_the_usual_files_are_what_an_engine_reads(path: str, wanted: bool) -> None:
    assert is_wanted(path) is wanted


def test_include_adds_and_exclude_takes_away() -> None:
    assert is_wanted("modeling.py", include=["*.py"])
    assert is_wanted("original/params.json", include=["original/*"])
    assert not is_wanted("consolidated.safetensors", exclude=["consolidated*"])
    assert not is_wanted("modeling.py", include=["*.py"], exclude=["modeling*"])


# from digests


def test_digests_and_a_base_url_become_a_manifest(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    created = create(sums="SHA256SUMS", base=f"{hub.url}/files/")
    assert_whole(created, hub.files)
    assert created.manifest.sources == (f"{hub.url}/files",)
    assert_only_ranges_of_shards(hub)


def test_the_list_itself_may_be_a_url(hub: Hub) -> None:
    created = create(sums=f"{hub.url}/SHA256SUMS", base=f"{hub.url}/files")
    assert_whole(created, hub.files)


def test_digests_and_a_directory_become_a_manifest(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums(model_files()))
    assert_whole(create(sums="SHA256SUMS", directory=directory), model_files())


def test_files_that_are_at_hand_are_all_compared_with_their_list(
    directory: Path, tmp_path: Path
) -> None:
    """Also the weights: a byte of the last tensor shows in no header."""
    (tmp_path / "SHA256SUMS").write_text(sums(model_files()))
    with (directory / "model-00002-of-00002.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    message = refusal(sums="SHA256SUMS", directory=directory)
    assert "model-00002-of-00002.safetensors: has sha256" in message
    assert "its list says" in message


@pytest.mark.parametrize("ranges", [True, False])
def test_a_site_without_head_tells_sizes_too(hub: Hub, tmp_path: Path, ranges: bool) -> None:
    hub.head, hub.ranges = False, ranges
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    created = create(sums="SHA256SUMS", base=f"{hub.url}/files")
    assert digests(created.manifest) == expected(hub.files)
    assert [file.size for file in created.manifest.files] == [
        len(hub.files[path]) for path in CHOSEN
    ]


def test_a_site_without_ranges_gives_a_manifest_without_headers(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    created = create(sums="SHA256SUMS", base=f"{hub.url}/files")
    assert digests(created.manifest) == expected(hub.files)
    assert not created.has_headers
    assert not (created.path.parent / "headers.json").exists()
    assert any("capacity will be 'unknown'" in note for note in created.notes)


def test_a_config_json_that_is_not_what_its_digest_says_is_refused(
    hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    hub.files["config.json"] = hub.files["config.json"].replace(b"Llama", b"Lhama")
    message = refusal(sums="SHA256SUMS", base=f"{hub.url}/files")
    assert "/files/config.json: has sha256" in message
    assert "its list says" in message


def test_a_file_that_is_listed_but_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums({**hub.files, "more.json": b"{}"}))
    message = refusal(sums="SHA256SUMS", base=f"{hub.url}/files")
    assert message == f"{hub.url}/files/more.json: 404 Not Found"


def test_a_page_instead_of_the_list_is_named(hub: Hub) -> None:
    hub.answers["/SHA256SUMS"] = (200, b"<!DOCTYPE html><html>log in</html>")
    message = refusal(sums=f"{hub.url}/SHA256SUMS", base=f"{hub.url}/files")
    assert "answers with an HTML page" in message


def test_the_guides_digest_of_66_digits_is_refused_with_file_and_line(tmp_path: Path) -> None:
    text = f"{'ab' * 32}  config.json\n{'ab' * 33}  model.safetensors\n"
    (tmp_path / "SHA256SUMS").write_text(text)
    message = refusal(OperatorError, sums="SHA256SUMS", base="http://127.0.0.1:9/files")
    assert message.startswith(
        "SHA256SUMS:2: the digest of model.safetensors has 66 digits, expected 64"
    )


def test_a_base_is_not_asked_for_what_is_left_out(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    create(sums="SHA256SUMS", base=f"{hub.url}/files")
    assert not [asked for asked in hub.asked if "README" in asked.url]


# from Hugging Face


def test_a_hub_becomes_a_manifest_pinned_to_the_commit(hub: Hub) -> None:
    created = create(hub=MODEL)
    assert_whole(created, hub.files)
    assert created.manifest.revision == COMMIT
    assert created.manifest.sources == (f"{hub.url}/{MODEL}/resolve/{COMMIT}",)
    assert f'{MODEL} at {hub.url}, revision "main"' in created.path.read_text().splitlines()[0]


def test_the_weights_are_not_downloaded(hub: Hub) -> None:
    create(hub=MODEL)
    assert_only_ranges_of_shards(hub)


def test_the_tree_is_read_to_its_last_page(hub: Hub) -> None:
    hub.page = 3
    assert_whole(create(hub=MODEL), hub.files)
    assert sum("/tree/" in path for path in hub.paths()) == 5


def test_a_mirror_that_names_hugging_face_as_the_next_page_is_asked_itself(hub: Hub) -> None:
    hub.page, hub.next_host = 5, "https://huggingface.co"
    assert_whole(create(hub=MODEL), hub.files)


def test_a_revision_is_asked_for_by_its_whole_name(hub: Hub) -> None:
    create(hub=MODEL, revision="refs/pr/1")
    assert any(asked.url.endswith("/revision/refs%2Fpr%2F1") for asked in hub.asked)


def test_more_sources_stand_in_front_of_the_hub(hub: Hub) -> None:
    created = create(hub=MODEL, sources=("file:///srv/models/tiny",))
    assert created.manifest.sources[0] == "file:///srv/models/tiny"
    assert len(created.manifest.sources) == 2


def test_a_busy_hub_is_asked_again(hub: Hub) -> None:
    hub.busy = 2
    assert_whole(create(hub=MODEL), hub.files)


def test_a_range_that_breaks_is_asked_for_again(hub: Hub) -> None:
    hub.broken = 3
    assert_whole(create(hub=MODEL), hub.files)


def test_ranges_that_always_break_are_named(hub: Hub) -> None:
    hub.broken = 1000
    assert "the connection broke" in refusal(hub=MODEL)


def test_a_hub_that_stays_busy_is_named(hub: Hub) -> None:
    hub.busy = 10_000
    message = refusal(hub=MODEL)
    assert "503 Service Unavailable" in message
    assert len(hub.asked) == 5


REVISION = f"/api/models/{MODEL}/revision/main"
TREE = f"/api/models/{MODEL}/tree/{COMMIT}"


@pytest.mark.parametrize("path", [REVISION, TREE, f"/{MODEL}/resolve/{COMMIT}/config.json"])
def test_json_that_is_nested_too_deep_is_none(hub: Hub, path: str) -> None:
    deep = b"[" * 100_000
    hub.answers[path] = (200, deep)
    hub.listed["config.json"] = {"size": len(deep), "oid": git_blob(deep)}
    assert "not JSON" in refusal(hub=MODEL)


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def test_an_index_that_is_nested_too_deep_is_none(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_bytes(b"[" * 100_000)
    assert "is not JSON: nested too deep" in refusal(directory=directory)


@pytest.mark.parametrize("pause", ["9" * 400, "9" * 5000, "Mon, 1 Jan 99999999999 00:00:00 GMT"])
def test_a_hub_that_names_an_absurd_pause_is_asked_again(hub: Hub, pause: str) -> None:
    hub.busy, hub.retry_after = 2, pause
    assert_whole(create(hub=MODEL), hub.files)


@pytest.mark.parametrize("address", ["http://[::1", "http://a..b/x", "ftp://h/x"])
def test_a_hub_that_redirects_to_no_address_is_named(hub: Hub, address: str) -> None:
    hub.answers[REVISION], hub.headers[REVISION] = (302, b""), {"Location": address}
    assert f"redirects to what is no web address: '{address}'" in refusal(hub=MODEL)


def test_a_next_page_that_is_no_address_is_refused(hub: Hub) -> None:
    hub.page, hub.next_host = 1, "http://[::1"
    assert "names a next page that is no address" in refusal(hub=MODEL)


def test_a_tree_without_end_is_refused(hub: Hub) -> None:
    hub.endless = True
    assert "page 201 of a list that does not end" in refusal(hub=MODEL)


@pytest.mark.parametrize("size", [10**300, 2**63])
def test_a_listed_size_that_no_file_has_is_refused(hub: Hub, size: int) -> None:
    hub.listed["config.json"] = {"size": size}
    assert "not a listing of files: " in refusal(hub=MODEL)


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "a\nb"])
def test_a_quantization_that_is_no_name_is_refused(directory: Path, name: str) -> None:
    (directory / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": name}})
    )
    assert refusal(directory=directory).endswith("no name")


def test_a_bundle_of_the_environment_that_is_none_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nope")
    assert refusal(OperatorError, hub=MODEL).startswith("REQUESTS_CA_BUNDLE /nope: cannot be read")


def test_a_hub_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "Connection refused" in refusal(hub=MODEL)


def test_a_hub_without_ranges_gives_a_manifest_without_headers(hub: Hub) -> None:
    hub.ranges = False
    created = create(hub=MODEL)
    assert digests(created.manifest) == expected(hub.files)
    assert not created.has_headers


def test_a_file_that_is_not_the_listed_blob_is_refused(hub: Hub) -> None:
    hub.listed["chat_template.jinja"] = {"oid": "a" * 40}
    message = refusal(hub=MODEL)
    assert "chat_template.jinja: has Git blob SHA1" in message
    assert f"its list says {'a' * 40}" in message


@pytest.mark.parametrize("size", [1, 1000])
def test_a_file_of_another_size_than_listed_is_refused(hub: Hub, size: int) -> None:
    hub.listed["chat_template.jinja"] = {"size": size}
    message = refusal(hub=MODEL)
    assert "chat_template.jinja: sends more than" in message or "sent 14 bytes" in message


def test_a_shard_that_contradicts_its_listed_size_is_refused(hub: Hub) -> None:
    path = "model-00001-of-00002.safetensors"
    digest = hashlib.sha256(hub.files[path]).hexdigest()
    hub.listed[path] = {"lfs": {"oid": digest, "size": len(hub.files[path]) - 1}}
    assert f"{path}: truncated" in refusal(hub=MODEL)


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/../../evil.json"])
def test_a_listed_path_that_leaves_the_model_is_refused(hub: Hub, path: str) -> None:
    hub.files[path] = b"{}"
    message = refusal(hub=MODEL, include=("*.json",))
    assert f"{MODEL} at {hub.url}: a file's path {path!r}" in message


def test_a_path_listed_twice_is_refused(hub: Hub) -> None:
    hub.listed["tokenizer.json"] = {"path": "config.json"}
    assert "lists 'config.json' twice" in refusal(hub=MODEL)


def test_the_token_is_sent_to_the_hub_and_not_to_where_it_redirects(hub: Hub) -> None:
    hub.gated = True
    assert_whole(create(hub=MODEL, token=TOKEN), hub.files)
    redirected = [asked for asked in hub.asked if asked.url.startswith("/cdn/")]
    assert len(redirected) > 0
    assert not [asked for asked in redirected if "authorization" in asked.headers]


def test_a_gated_model_without_a_token_says_what_to_do(hub: Hub) -> None:
    hub.gated = True
    message = refusal(OperatorError, hub=MODEL)
    assert f"{MODEL} at {hub.url}: gated: accept its terms" in message
    assert "HF_TOKEN" in message


def test_a_private_model_looks_like_none(hub: Hub) -> None:
    hub.private = True
    assert "no such model, or a private one" in refusal(OperatorError, hub=MODEL)
    assert_whole(create(hub=MODEL, token=TOKEN), hub.files)


@pytest.mark.parametrize("code", [{}, {"X-Error-Code": "RepoNotFound"}])
def test_a_refused_token_is_no_missing_model(hub: Hub, code: dict[str, str]) -> None:
    hub.answers[REVISION] = (401, b"no")
    said = "Invalid credentials in Authorization header"
    hub.headers[REVISION] = {"X-Error-Message": said, **code}
    message = refusal(OperatorError, hub=MODEL, token="hf_old")
    assert f"401: the token was refused ({said}): is it expired or mistyped?" in message
    assert "hf_old" not in message
    assert "no such model" in refusal(OperatorError, hub=MODEL)


def test_a_list_that_wants_a_token_says_so(hub: Hub) -> None:
    hub.answers["/SHA256SUMS"] = (401, b"no")
    message = refusal(sums=f"{hub.url}/SHA256SUMS", base=f"{hub.url}/files")
    assert "401 Unauthorized: needs a token, none was sent: --token env:NAME" in message


def test_the_token_goes_to_no_second_host_and_not_in_the_clear(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hub.url.replace("127.0.0.1", "localhost")
    site = {"sums": f"{other}/SHA256SUMS", "base": f"{hub.url}/files", "token": TOKEN}
    assert "one token and several hosts" in refusal(OperatorError, **site)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.invalid")
    message = refusal(OperatorError, hub=MODEL, token=TOKEN)
    assert "would go in the clear to http://mirror.invalid" in message
    assert hub.asked == []
    create(**site, token_for=hub.url)
    sent = {asked.url: "authorization" in asked.headers for asked in hub.asked}
    assert not sent.pop("/SHA256SUMS")
    assert all(sent.values())


def test_an_unset_variable_is_to_be_exported_and_no_deploy_is_spoken_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "--hub", MODEL, "--token", "env:NOPE")
    assert code == 2
    assert err == "error: env:NOPE: the environment variable NOPE is not set: export it\n"


def test_an_unknown_model_and_an_unknown_revision_are_named(hub: Hub) -> None:
    assert "acme/none at" in refusal(OperatorError, hub="acme/none")
    assert "no revision 'v9'" in refusal(OperatorError, hub=MODEL, revision="v9")


def test_a_page_instead_of_the_api_is_named(hub: Hub) -> None:
    hub.answers[f"/api/models/{MODEL}/revision/main"] = (200, b"<!doctype html><html>")
    message = refusal(hub=MODEL)
    assert "answers with an HTML page: is this the address of an API" in message


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"sha": "main"}', b'{"sha": 7}'])
def test_a_hub_that_tells_no_commit_is_refused(hub: Hub, answer: bytes) -> None:
    hub.answers[f"/api/models/{MODEL}/revision/main"] = (200, answer)
    assert "does not tell the commit" in refusal(hub=MODEL)


@pytest.mark.parametrize(
    "answer",
    [b"{}", b'[{"type": "file"}]', b'[{"type": "file", "path": "a", "oid": "b", "size": -1}]'],
)
def test_a_tree_that_is_none_is_refused(hub: Hub, answer: bytes) -> None:
    hub.answers[f"/api/models/{MODEL}/tree/{COMMIT}"] = (200, answer)
    assert "not a listing of files" in refusal(hub=MODEL)


def test_a_listed_digest_that_is_none_is_refused(hub: Hub) -> None:
    hub.listed["tokenizer.json"] = {"lfs": {"oid": "ab" * 33, "size": 1}}
    assert "66 digits, expected 64" in refusal(hub=MODEL)


# from ModelScope


def test_modelscope_becomes_a_manifest_pinned_to_the_commit(hub: Hub) -> None:
    created = create(modelscope=MODEL)
    assert_whole(created, hub.files)
    assert created.manifest.revision == COMMIT
    assert created.manifest.sources == (f"{hub.url}/models/{MODEL}/resolve/{COMMIT}",)


def test_files_whose_digest_modelscope_does_not_tell_are_read(hub: Hub) -> None:
    hub.sha256_told = False
    assert_whole(create(modelscope=MODEL), hub.files)


def test_an_unknown_model_and_revision_of_modelscope_are_named(hub: Hub) -> None:
    message = refusal(OperatorError, modelscope="acme/none")
    assert "acme/none at" in message
    assert "model not found (code 10010205001)" in message
    message = refusal(OperatorError, modelscope=MODEL, revision="v9")
    assert "revision 'v9': revision not found" in message


def test_a_model_that_changes_while_it_is_listed_is_refused(hub: Hub) -> None:
    hub.commits = [COMMIT, "f" * 40]
    assert "changed while it was listed" in refusal(modelscope=MODEL)


def test_another_answer_than_modelscopes_is_refused(hub: Hub) -> None:
    hub.answers[f"/api/v1/models/{MODEL}/commits"] = (200, b"[]")
    assert "not an answer of ModelScope's API" in refusal(modelscope=MODEL)


# the command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["manifest", "create", "tiny", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_says_what_it_wrote(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--hub", MODEL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == (
        f"models/tiny/manifest.toml: 7 files, 1.7 MB, revision {COMMIT},"
        " quantization compressed-tensors-fp8-block"
    )
    assert lines[-2].startswith("note: left out: .gitattributes, README.md, logo.png")
    count = len(Model(Path()).parts()[0])
    assert f"header of model-00001-of-00002.safetensors: {count} tensors" in lines


def test_the_token_comes_from_the_environment_or_a_0600_file(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, _ = run(capsys, "--hub", MODEL)
    assert code == 0
    assert TOKEN not in out + Path("models/tiny/manifest.toml").read_text()
    monkeypatch.delenv("HF_TOKEN")
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert run(capsys, "--hub", MODEL, "--force", "--token", f"file:{file}")[0] == 0
    file.chmod(0o644)
    code, _, err = run(capsys, "--hub", MODEL, "--force", "--token", f"file:{file}")
    assert code == 2
    assert "mode 0644" in err


def test_a_token_that_no_header_can_carry_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "geheim→")
    code, _, err = run(capsys, "--hub", MODEL)
    assert code == 2
    assert err.startswith("error: env:HF_TOKEN: the secret must be one line of printable ASCII")
    assert hub.asked == []


def test_a_name_that_no_terminal_shows_is_left_out_and_said(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / os.fsdecode(b"\xff\x1b\n.bin")).write_bytes(b"x")
    code, out, _ = run(capsys, "--directory", str(directory))
    assert code == 0
    assert r"\udcff\x1b\n.bin" in out


def test_a_pasted_token_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--hub", MODEL, "--token", TOKEN)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "expected env:VARIABLE or file:/absolute/path" in said
    assert TOKEN not in said


def test_the_token_of_hugging_face_is_not_sent_elsewhere(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run(capsys, "--modelscope", MODEL)
    assert len(hub.asked) > 3
    assert not [asked for asked in hub.asked if "authorization" in asked.headers]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of --directory DIR, --sums FILE, --hub ORG/MODEL and --modelscope"),
        (["--hub", MODEL, "--directory", "."], "give one of"),
        (["--hub", MODEL, "--modelscope", MODEL], "give one of"),
        (["--sums", "x"], "--sums needs the files too: give --base URL or --directory DIR"),
        (["--sums", "x", "--base", "http://h", "--directory", "."], "--sums needs the files"),
        (["--hub", MODEL, "--base", "http://h"], "--base goes with --sums"),
        (["--hub", "gemma"], "'gemma': expected ORG/MODEL"),
        (["--hub", "../../x"], "expected ORG/MODEL"),
        (["--sums", "nowhere", "--base", "http://h"], "nowhere: cannot be read: No such file"),
        (["--directory", "nowhere"], "nowhere: no such directory"),
        (["--directory", ".", "--source", "ftp://h"], "source 'ftp://h': expected http"),
        (["--directory", ".", "--revision", "a/b"], "--revision 'a/b': it becomes a directory"),
    ],
)
def test_a_command_line_that_cannot_mean_anything_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "endpoint", ["ftp://h", "http://joe:hunter2@h", "file:///srv", "http://a..b", "http://[::1"]
)
def test_an_endpoint_that_is_none_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, kind in (("HF_ENDPOINT", "hub"), ("MODELSCOPE_DOMAIN", "modelscope")):
        monkeypatch.setenv(variable, endpoint)
        message = refusal(OperatorError, **{kind: MODEL})
        assert message.startswith(variable)
        assert "hunter2" not in message


def test_a_name_that_is_no_directorys_is_refused(directory: Path) -> None:
    with pytest.raises(OperatorError, match=r"NAME '\.\./x': it becomes a directory's name"):
        create(name="../x", directory=directory)


# writing


def test_a_manifest_that_exists_stays_unless_forced(directory: Path) -> None:
    create(directory=directory)
    before = Path("models/tiny/manifest.toml").read_bytes()
    with pytest.raises(OperatorError, match=r"models/tiny/manifest\.toml: exists: give --force"):
        create(directory=directory, revision="2")
    assert Path("models/tiny/manifest.toml").read_bytes() == before
    assert create(directory=directory, revision="2", force=True).manifest.revision == "2"


def test_what_described_the_old_files_goes_with_them(hub: Hub, directory: Path) -> None:
    folder = create(directory=directory).path.parent
    (folder / "model.torrent").write_text("old")
    (folder / "measured.toml").write_text("old")
    del hub.files["generation_config.json"]
    hub.ranges = False
    created = create(hub=MODEL, force=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "manifest.toml",
        "measured.toml",
    ]
    assert any("model.torrent was of other files" in note for note in created.notes)


def test_a_torrent_of_the_same_files_stays(directory: Path) -> None:
    folder = create(directory=directory).path.parent
    (folder / "model.torrent").write_text("same")
    create(directory=directory, force=True, sources=("http://other",))
    assert (folder / "model.torrent").read_text() == "same"


def test_a_failed_run_leaves_the_old_manifest_as_it_was(directory: Path) -> None:
    folder = create(directory=directory).path.parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckFailed):
        create(directory=directory, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_named(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(CheckFailed, match="models/tiny: cannot be written"):
        create(directory=directory)


def test_a_path_that_is_a_file_and_a_directory_is_refused(hub: Hub) -> None:
    hub.files["tokenizer.json/x.json"] = b"{}"
    assert "also the directory of another file" in refusal(OperatorError, hub=MODEL)


def test_names_with_quotes_and_letters_of_any_script_survive(tmp_path: Path) -> None:
    files = model_files() | {'sub/"词表".json': b"{}"}
    created = create(directory=write(tmp_path / "weights", files))
    assert load_manifest(created.path) == created.manifest
    assert 'sub/"词表".json' in digests(created.manifest)


def test_quantization_is_read_out_of_config_json(tmp_path: Path) -> None:
    names = []
    for layout in ("none", "deepseek", "fp8-tensor"):
        folder = write(tmp_path / layout, model_files(layout))
        names.append(create(directory=folder, force=True).manifest.quantization)
    assert names == ["none", "fp8-block", "fp8"]


# the documentation


def test_every_command_of_the_page_works(
    hub: Hub, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SHA256SUMS").write_text(sums(hub.files))
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    text = (REPO / "docs/models.md").read_text()
    for shown, ours in {
        "Qwen/Qwen3-8B-FP8": MODEL,
        "https://mirror.example/models/qwen3-8b-fp8": f"{hub.url}/files",
        "/srv/models/qwen3-8b-fp8": str(directory),
        "/srv/models/NAME": str(directory),
        "/srv/copy/": f"{tmp_path}/copy/",
        "models/NAME/": "models/qwen3-8b-fp8/",
        "/root/hf-token": str(token),
    }.items():
        assert shown in text
        text = text.replace(shown, ours)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    fp8fleet ")]
    assert len(lines) == 17
    for line in lines:
        if "create" in line:
            shutil.rmtree("models", ignore_errors=True)
        # what `inspect` finds wrong with files that are no real checkpoint is another test's
        fine = (0, 1) if line.startswith("fp8fleet inspect ") else (0,)
        assert main(shlex.split(line)[1:]) in fine, capsys.readouterr().err


# verify


def test_manifest_verify_checks_a_directory(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = str(create(directory=directory).path)
    assert main(["manifest", "verify", manifest, str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {finding["severity"] for finding in report["findings"]} == {"warning"}
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["manifest", "verify", manifest, str(directory)]) == 1
    assert "error: model-00002-of-00002.safetensors has" in capsys.readouterr().out


def test_manifest_verify_full_reads_what_the_stamp_covers(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = str(create(directory=directory).path)
    path = directory / "tokenizer.json"
    assert main(["manifest", "verify", manifest, str(directory)]) == 0
    status = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"[")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(["manifest", "verify", manifest, str(directory)]) == 0
    assert main(["manifest", "verify", manifest, str(directory), "--full"]) == 1
    assert "error: tokenizer.json has sha256" in capsys.readouterr().out


@pytest.mark.parametrize(("indexed", "code"), [(True, 0), (False, 1)])
def test_verify_and_inspect_say_the_same_of_a_stray_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], indexed: bool, code: int
) -> None:
    model = Model(tmp_path / "weights")
    model.indexed = indexed
    model.write()
    manifest = str(create(directory=model.directory).path)
    shutil.copy(model.shard(1), model.directory / "stray.safetensors")
    severity = "warning" if indexed else "error"
    for command in (
        ["verify", manifest, str(model.directory)],
        ["inspect", str(model.directory), "--manifest", manifest],
    ):
        assert main(command) == code
        out = capsys.readouterr().out.splitlines()
        assert [line for line in out if line.startswith(f"{severity}: stray.safetensors is ")]
