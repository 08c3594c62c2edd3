"""Lists the files of a model on a hub: Hugging Face, its mirrors, ModelScope."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.manifest import LARGEST, check_sha256, check_source
from fp8fleet.web import Refused, Web

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://www.modelscope.cn"
_MOST_PAGES = 200
"""Of a tree; Hugging Face's own have up to 1000 files each."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubFile:
    """A file as a hub lists it."""

    path: str
    size: int
    sha256: str | None
    """None: the hub does not tell it, the file has to be read."""
    blob_sha1: str | None = None
    """Git's own name of the file's content; None: not told, or of an LFS pointer."""


@dataclass(frozen=True)
class Listing:
    """A model's files at one commit."""

    endpoint: str
    """The hub's own URL."""
    commit: str
    """40 hex digits."""
    base: str
    """The URL under which the commit's files are."""
    files: tuple[HubFile, ...]


def hugging_face(web: Web, model: str, revision: str) -> Listing:
    """List a model of Hugging Face or of the mirror that HF_ENDPOINT names.

    API, as huggingface_hub uses it (src/huggingface_hub/hf_api.py: model_info, list_repo_tree;
    utils/_pagination.py; utils/_http.py: fix_hf_endpoint_in_url, hf_raise_for_status):
    ``GET /api/models/MODEL/revision/REV`` gives the commit as ``sha``; ``GET
    /api/models/MODEL/tree/REV?recursive=true`` gives pages of ``{"type", "path", "size", "oid",
    "lfs": {"oid", "size"}}``, the next one in the Link header, where mirrors name Hugging Face's
    own host. ``oid`` is Git's SHA1 of the file or, with ``lfs``, of its pointer; ``lfs.oid`` is the
    file's SHA256. Files are at ``/MODEL/resolve/REV/PATH``.

    Args:
        model: ``ORG/MODEL``.
        revision: branch, tag or commit.

    Raises:
        OperatorError: no such model or revision, or a model that needs terms accepted.
        CheckFailed: the endpoint does not answer as such an API.
    """
    endpoint = hugging_face_endpoint()
    named = quote(revision, safe="")
    with explained(model, revision, endpoint):
        told, _ = web.json(f"{endpoint}/api/models/{model}/revision/{named}")
    commit = _commit(told.get("sha") if isinstance(told, dict) else None, model, endpoint)
    entries = _tree(web, endpoint, model, commit)
    files = tuple(_hugging_face_file(entry) for entry in entries if entry.type == "file")
    return Listing(endpoint, commit, f"{endpoint}/{model}/resolve/{commit}", files)


class _Told(BaseModel):
    """What a hub tells; what is not asked for is left."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Lfs(_Told):
    oid: Annotated[str, AfterValidator(lambda oid: check_sha256(oid.removeprefix("sha256:")))]
    size: Annotated[int, Field(ge=0, le=LARGEST)]


class _Entry(_Told):
    type: str
    path: str
    oid: str
    size: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    lfs: _Lfs | None = None


def _hugging_face_file(entry: _Entry) -> HubFile:
    if entry.lfs is not None:
        return HubFile(entry.path, entry.lfs.size, entry.lfs.oid)
    return HubFile(entry.path, entry.size, None, entry.oid)


def _tree(web: Web, endpoint: str, model: str, commit: str) -> Iterator[_Entry]:
    url: str | None = f"{endpoint}/api/models/{model}/tree/{commit}?recursive=true"
    asked: set[str] = set()
    while url is not None:
        if url in asked:
            raise CheckFailed(f"{url}: names itself as its next page")
        if len(asked) == _MOST_PAGES:
            raise CheckFailed(f"{url}: page {_MOST_PAGES + 1} of a list that does not end")
        asked.add(url)
        with explained(model, commit, endpoint):
            page, following = web.json(url)
        yield from _entries(_Entry, page, url)
        url = following and _at(endpoint, following)


def _at(endpoint: str, url: str) -> str:
    """``url`` on the endpoint: mirrors pass Hugging Face's own addresses on unchanged."""
    try:
        parts, own = urlsplit(url), urlsplit(endpoint)
    except ValueError:
        raise CheckFailed(f"{endpoint}: names a next page that is no address: {url!r}") from None
    path = parts.path if parts.path.startswith(own.path) else own.path + parts.path
    return urlunsplit((own.scheme, own.netloc, path, parts.query, ""))


def modelscope(web: Web, model: str, revision: str) -> Listing:
    """List a model of ModelScope, or of the domain that MODELSCOPE_DOMAIN names.

    API, as the modelscope package uses it (modelscope/hub/api.py: list_repo_commits,
    get_model_files; hub/errors.py: is_ok): ``GET /api/v1/models/MODEL/commits?Ref=REV&PageNumber=1
    &PageSize=1`` gives the newest commit as ``Data.Commit[0].Id``; ``GET
    /api/v1/models/MODEL/repo/files?Revision=REV&Recursive=true`` gives ``Data.Files`` with
    ``{"Path", "Type": "blob" or "tree", "Size", "Sha256"}``. A failure has another ``Code`` than
    200 and says why in ``Message``. Files are at ``/models/MODEL/resolve/REV/PATH``.

    Args:
        model: ``ORG/MODEL``.
        revision: branch or tag.

    Raises:
        OperatorError: no such model or revision.
        CheckFailed: the endpoint does not answer as such an API, or the model changed meanwhile.
    """
    endpoint = modelscope_endpoint()
    commit = _newest_commit(web, endpoint, model, revision)
    api = f"{endpoint}/api/v1/models/{model}/repo/files"
    data = _modelscope_data(
        web, f"{api}?Revision={quote(revision, safe='')}&Recursive=true", model, revision, endpoint
    )
    entries = _entries(_ModelScopeFile, data.get("Files") or [], api)
    # The listing is by branch, the sources by commit: both have to be the same state.
    if _newest_commit(web, endpoint, model, revision) != commit:
        raise CheckFailed(f"{model} at {endpoint}: changed while it was listed: run it again")
    files = tuple(
        HubFile(entry.path, entry.size, entry.sha256 or None)
        for entry in entries
        if entry.type == "blob"
    )
    return Listing(endpoint, commit, f"{endpoint}/models/{model}/resolve/{commit}", files)


class _ModelScopeFile(_Told):
    type: Annotated[str, Field(alias="Type")]
    path: Annotated[str, Field(alias="Path")]
    size: Annotated[int, Field(alias="Size", ge=0, le=LARGEST)] = 0
    sha256: Annotated[
        str | None,
        Field(alias="Sha256"),
        AfterValidator(lambda digest: check_sha256(digest) if digest else None),
    ] = None


def _newest_commit(web: Web, endpoint: str, model: str, revision: str) -> str:
    ref = quote(revision, safe="")
    url = f"{endpoint}/api/v1/models/{model}/commits?Ref={ref}&PageNumber=1&PageSize=1"
    match _modelscope_data(web, url, model, revision, endpoint).get("Commit"):
        case [{"Id": commit}, *_]:
            return _commit(commit, model, endpoint)
    raise OperatorError(f"{model} at {endpoint}: no revision {revision!r}")


def _modelscope_data(
    web: Web, url: str, model: str, revision: str, endpoint: str
) -> dict[str, Any]:
    with explained(model, revision, endpoint):
        told, _ = web.json(url)
    match told:
        case {"Code": 200, "Data": dict(data)}:
            return data
        case {"Code": code, "Message": message}:
            raise OperatorError(
                f"{model} at {endpoint}, revision {revision!r}: {message} (code {code}): check"
                " both names; private models are not listed: use --directory for them"
            )
    raise CheckFailed(f"{url}: not an answer of ModelScope's API")


def hugging_face_endpoint() -> str:
    """Hugging Face, or the mirror that HF_ENDPOINT names; `OperatorError` if that is none."""
    return _endpoint("HF_ENDPOINT", HUGGING_FACE)


def modelscope_endpoint() -> str:
    """ModelScope, or the domain that MODELSCOPE_DOMAIN names; `OperatorError` if that is none."""
    return _endpoint("MODELSCOPE_DOMAIN", MODELSCOPE)


def _endpoint(variable: str, default: str) -> str:
    """The endpoint that an environment variable names, as a URL without a slash at its end."""
    value = os.environ.get(variable, "").strip() or default
    if "://" not in value:
        value = f"https://{value}"
    try:
        checked = check_source(value)
    except ValueError as error:
        raise OperatorError(f"{variable}: {error}") from None
    if checked.startswith("file:"):
        raise OperatorError(f"{variable} = {value!r}: expected an http or https address")
    return checked


def check_model(value: str) -> str:
    """Check an ``ORG/MODEL``.

    Raises:
        OperatorError: it has another form.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value, flags=re.ASCII):
        raise OperatorError(f"{value!r}: expected ORG/MODEL, such as RedHatAI/gemma-4-31B-it-FP8")
    return value


def _commit(told: Any, model: str, endpoint: str) -> str:
    if isinstance(told, str) and re.fullmatch(r"[0-9a-f]{40}", told):
        return told
    raise CheckFailed(f"{model} at {endpoint}: the endpoint does not tell the commit: got {told!r}")


def _entries(kind: type[_T], page: Any, url: str) -> list[_T]:
    try:
        return TypeAdapter(list[kind]).validate_python(page)  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckFailed(f"{url}: not a listing of files: {place}: {first['msg']}") from None


@contextmanager
def explained(model: str, revision: str, endpoint: str) -> Iterator[None]:
    """Say what a hub's refusal means; everything else passes.

    Codes: huggingface_hub, src/huggingface_hub/utils/_http.py, hf_raise_for_status.

    Raises:
        OperatorError: no such model or revision, or no access.
    """
    try:
        yield
    except Refused as refused:
        where = f"{model} at {endpoint}"
        token = "set HF_TOKEN or give --token env:NAME or file:/PATH"
        if refused.status == 401 and refused.login:
            raise OperatorError(f"{where}: 401: {refused.login}") from None
        if refused.code == "GatedRepo":
            raise OperatorError(
                f"{where}: gated: accept its terms on its page, then {token} of the same account"
            ) from None
        if refused.code == "RevisionNotFound":
            raise OperatorError(f"{where}: no revision {revision!r}") from None
        if refused.code == "RepoNotFound" or refused.status == 401:
            raise OperatorError(
                f"{where}: no such model, or a private one: check the name; with access, {token}"
            ) from None
        if refused.status == 404:
            raise OperatorError(f"{where}: not found, revision {revision!r}: {refused}") from None
        if refused.status == 403:
            raise OperatorError(f"{where}: {refused}") from None
        raise
