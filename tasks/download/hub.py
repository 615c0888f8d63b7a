"""Datasets on the Hugging Face hub: pinned to a commit, their files found by configuration and split, and fetched.

The libraries are imported where they are used, because that takes seconds. No code of a repository is ever run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode

from flat_tokens.extras import pa
from flat_tokens.manifest import SplitName
from flat_tokens.stores.answers import MOST_BYTES, bounded, check_encoding
from flat_tokens.stores.local import make_directory, sync
from flat_tokens.stores.retry import Tries, causes, own_status, retry, retry_after, teller
from tasks.config import Source
from tasks.locations import check_hop
from tasks.models import FoundFile, PinnedSource, digest_of
from tasks.output.paths import STAGING

logger = logging.getLogger(__name__)
T = TypeVar("T")

READ_AS_FILES = ("parquet", "json", "text", "csv", "arrow")
"""Modules of ``datasets`` whose files this service reads itself."""
PACKED = (".zip", ".tar", ".tgz", ".bz2", ".xz", ".lz4", ".7z", ".rar")
"""Archives and compressions that ``datasets`` unpacks and this service does not."""
INDIFFERENT = ("name", "version", "data_dir", "data_files", "description", "features", "columns", "batch_size", "chunksize")
"""Settings of a configuration that change nothing about the texts in its files."""
BUCKETS = "hf://buckets/"
"""How the URLs of buckets begin. They are read as other stores are, their files pinned by their digests."""
PATHS_AT_ONCE = 500
ROWS_AT_ONCE = 1000
BYTES_AT_ONCE = 32 << 20
ATTEMPTS = 6
LONGEST_WAIT = 300.0
"""The hub counts requests in windows of five minutes."""
TRIES = Tries(first_wait=1.0, longest_wait=LONGEST_WAIT, attempts=ATTEMPTS)
TIMEOUT = 30.0


class UnsuitableError(ValueError):
    """A dataset cannot be used. The message says all, unlike those of the libraries' own ValueErrors."""


def resolve_hub(source: Source, index: int) -> PinnedSource:
    """The files of a dataset's configuration and split at the commit that its revision is now, each once, ordered by name.

    Files of a format that is read here are the repository's own. Other formats that ``datasets`` reads become one file a split,
    which ``fetch_hub`` writes. ValueError, naming what exists and the next step, if the dataset, revision, configuration or
    split does not exist, or if the hub does not answer.
    """
    hub = source.hub
    assert hub is not None
    if source.validation_split == hub.split:
        raise ValueError(f"{source.called}: validation_split is {hub.split!r}, which is the split that is read")
    what, validation = f"dataset {hub.path}", source.validation_split
    info = ask(what, partial(api().dataset_info, hub.path, revision=hub.revision, timeout=TIMEOUT), hub.revision)
    repo, commit = str(info.id), str(info.sha)
    builder = _configuration(repo, commit, hub.name)
    found = builder.config.data_files or {}
    splits = {str(split): list(dict.fromkeys(map(str, uris))) for split, uris in found.items() if uris}
    roles: dict[str, SplitName | None] = {hub.split: "train", validation: "validation"} if validation else {hub.split: None}
    for split in roles:
        if split not in splits:
            setting = "hub.split" if split == hub.split else "validation_split"
            raise ValueError(f"{what} has no split {split!r}; it has {_listing(splits)}. Set source.{setting}.")
    uris = [uri for split in roles for uri in splits[split]]
    _check_of_commit(repo, commit, uris)
    if builder.name in READ_AS_FILES and _as_they_are(builder.config, uris):
        files = [file for split, role in roles.items() for file in _repository_files(repo, commit, splits[split], index, role)]
    elif source.masked:
        raise ValueError(
            f"{what} is not stored as Parquet or JSON lines, where alone prompts or messages are read. Save it as "
            "one of them and name the files in source.path."
        )
    else:
        # Each split is one Parquet file that is yet to be written. Its URI has everything that its content depends on.
        files = []
        for split, role in roles.items():
            settings = {"name": hub.name, "split": split, "text": source.text_column, "id": source.id_column}
            query = urlencode({key: value for key, value in settings.items() if value is not None})
            uri = f"datasets://{repo}@{commit}?{query}"
            files.append(FoundFile(source=index, name=f"{split}.parquet", uri=uri, size=None, immutable=commit, split=role))
    files.sort(key=lambda file: file.name)
    for one, other in pairwise(files):
        if one.name == other.name:
            raise ValueError(f"{what}: {one.name} is in both {_listing(roles)}. Set source.validation_split to another split.")
    origin = f"hf://datasets/{repo} ({builder.config.name}, {hub.split})"
    return PinnedSource(origin=origin, revision=commit, files=tuple(files))


def fetch_hub(found: FoundFile, directory: Path) -> Path:
    """Fetch a file of the hub into the user's cache, or next to a *directory* that is removed, or convert it below that. Return
    its local path. ValueError if it cannot be had, OSError if the hub did not give it in several tries.
    """
    if found.uri.startswith("datasets://"):
        return _converted(found.uri, directory)
    from huggingface_hub import hf_hub_download, parse_hf_uri

    place = parse_hf_uri(found.uri)
    cache = directory.with_name("hub") if STAGING in directory.parts else None
    hub: dict[str, Any] = {"repo_type": place.type, "endpoint": os.environ.get("HF_ENDPOINT"), "cache_dir": cache}
    download = partial(hf_hub_download, place.id, place.path_in_repo, revision=place.revision, **hub)
    for force in (False, True):  # a copy in the cache may have been cut short
        call = partial(download, force_download=force)
        # RuntimeError: the library for large files raises it for faults of the network
        path = Path(ask(f"{place.type} {place.id}", call, place.revision, worn_out=OSError, passing=(RuntimeError,)))
        if found.size is None or path.stat().st_size == found.size:
            return path
    raise OSError(f"{found.uri} has {path.stat().st_size} bytes instead of {found.size}: it changed while it was fetched")


def api() -> Any:
    """The hub's interface, with the token of this process's credentials if they have one, else that of the environment."""
    from fsspec.config import conf
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=conf.get("hf", {}).get("token"))


def _datasets() -> Any:
    """The library ``datasets``. ValueError if it was imported with another HF_ENDPOINT: it would still ask that hub."""
    import datasets

    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint and datasets.config.HF_ENDPOINT.rstrip("/") != endpoint.rstrip("/"):
        raise ValueError(f"HF_ENDPOINT became {endpoint} while this process ran. Set it before the process starts.")
    return datasets


def _configuration(repo: str, commit: str, name: str | None) -> Any:
    """The builder of a configuration, its files found. Only its name and its settings are used."""
    datasets, what = _datasets(), f"dataset {repo}"
    place = f"hf://datasets/{repo}"  # the prefix keeps a local directory from being taken for the repository

    def find() -> Any:
        # A cache of its own: in the common one, an earlier version of the dataset would be taken for this one whenever the
        # hub does not answer.
        with tempfile.TemporaryDirectory(prefix="hub-") as cache:
            try:
                return datasets.load_dataset_builder(place, name=name, revision=commit, cache_dir=cache)
            except ValueError:
                names = datasets.get_dataset_config_names(place, revision=commit)
                if name is not None and name not in names:
                    raise UnsuitableError(
                        f"{what} has no configuration {name!r}; it has {_listing(names)}. Set source.hub.name."
                    ) from None
                if name is None and datasets.get_dataset_default_config_name(place, revision=commit) is None:
                    raise UnsuitableError(
                        f"{what} has several configurations: {_listing(names)}. Set source.hub.name to one of them."
                    ) from None
                raise

    return ask(what, find, commit)


def _listing(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(repr(name) for name in listed[:20]) or "none"
    return shown if len(listed) <= 20 else f"{shown} and {len(listed) - 20} more"


def _as_they_are(config: Any, uris: list[str]) -> bool:
    """Whether the files alone say everything: none is an archive, and no setting changes how they are read."""
    if any(uri.lower().endswith(PACKED) for uri in uris):
        return False
    usual = type(config)()
    unusual = {
        setting.name
        for setting in dataclasses.fields(config)
        if setting.name not in INDIFFERENT and getattr(config, setting.name) != getattr(usual, setting.name)
    }
    if getattr(config, "sep", None) == "\t" and all(".tsv" in PurePath(uri).suffixes for uri in uris):
        unusual -= {"sep", "delimiter"}
    return not unusual


def _repository_files(repo: str, commit: str, uris: list[str], index: int, role: SplitName | None) -> Iterator[FoundFile]:
    """The files of *uris* with their sizes."""
    prefix = f"hf://datasets/{repo}@{commit}/"
    names = [uri.removeprefix(prefix) for uri in uris]
    pinned = partial(FoundFile, source=index, immutable=commit, split=role)
    for start in range(0, len(names), PATHS_AT_ONCE):
        part = names[start : start + PATHS_AT_ONCE]
        call = partial(api().get_paths_info, repo, part, revision=commit, repo_type="dataset")
        infos = {info.path: info for info in ask(f"dataset {repo}", call, commit)}
        for name in part:
            info = infos.get(name)
            # the digest of a large file, git's name of others
            content = info and (f"sha256:{info.lfs.sha256}" if info.lfs else f"blob:{info.blob_id}")
            yield pinned(name=name, uri=prefix + name, size=info.size if info else None, content=content)


def _check_of_commit(repo: str, commit: str, uris: Iterable[str]) -> None:
    """ValueError if a file is of another place or revision, which its dataset's settings may name, and could change."""
    for uri in uris:
        if not uri.startswith(f"hf://datasets/{repo}@{commit}/"):
            raise UnsuitableError(
                f"dataset {repo} takes {uri} from another revision, which may move. Set source.hub.revision to that revision."
            )


def _converted(uri: str, directory: Path) -> Path:
    """Write the Parquet file of a ``datasets://`` URI below *directory*, unless it is there. Equal input gives equal bytes.
    ValueError if the dataset has no such column, or no text in it.
    """
    import pyarrow.parquet as pq

    match = re.fullmatch(r"datasets://([^@]+)@([0-9a-f]{40})\?(.*)", uri)
    if match is None:
        raise ValueError(f"{uri} is not datasets://REPOSITORY@COMMIT?split=...&text=...")
    repo, commit, query = match.groups()
    settings = {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
    columns = [settings["text"], *([settings["id"]] if "id" in settings else [])]
    path = directory / f"{digest_of('converted', uri)}.parquet"
    with contextlib.suppress(OSError, pa.ArrowException):
        pq.read_metadata(path)  # it is there with its end, which is written last
        return path
    make_directory(directory)
    datasets = _datasets()

    def write() -> None:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".hub-") as scratch:
            temporary = Path(scratch, path.name)
            named = {"name": settings.get("name"), "split": settings["split"], "revision": commit}
            data_files = _configuration(repo, commit, settings.get("name")).config.data_files or {}
            _check_of_commit(repo, commit, map(str, data_files.get(settings["split"], ())))
            rows = datasets.load_dataset(f"hf://datasets/{repo}", **named, streaming=True, cache_dir=scratch)
            _write_parquet(rows, columns, f"dataset {repo}, split {settings['split']!r}", temporary)
            os.replace(temporary, path)
            sync(directory)

    ask(f"dataset {repo}", write, commit, worn_out=OSError)
    return path


def _write_parquet(rows: Any, columns: list[str], what: str, path: Path) -> None:
    """Write *columns* of an iterable dataset as bytes: text that is not Unicode so reaches the policy for documents."""
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(columns))
    if rows.column_names is not None:
        _check_names(rows.column_names, columns, what)
        rows = rows.select_columns(names)  # what is not selected is not decoded
    schema = pa.schema([(name, pa.large_binary()) for name in names])
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, **options) as writer:
            for batch in _batches(rows, names, columns, what):
                writer.write_table(pa.table(batch, schema=schema))
        file.flush()
        os.fsync(file.fileno())


def _batches(rows: Any, names: list[str], columns: list[str], what: str) -> Iterator[dict[str, list[bytes | None]]]:
    """Rows of a hub dataset as batches of columns. ValueError for a value that is not text."""
    batch: dict[str, list[bytes | None]] = {name: [] for name in names}
    size = 0
    for number, row in enumerate(rows):
        if number == 0:
            _check_names(row, columns, what)
        for name in names:
            # Bytes as they are, text as UTF-8, lone surrogates included, and ids that are whole numbers as digits.
            value, is_text = row.get(name), name == columns[0]
            if isinstance(value, int) and not isinstance(value, bool) and not is_text:
                value = str(value)
            if isinstance(value, str):
                value = value.encode("utf-8", "surrogatepass")
            if not isinstance(value, bytes | None):
                wanted, setting = ("text", "text_column") if is_text else ("text or an integer", "id_column")
                raise UnsuitableError(
                    f"{what}, row {number}: {name!r} is {type(value).__name__}, not {wanted}. Set source.{setting} to another "
                    "column."
                )
            batch[name].append(value)
            size += len(value or b"")
        if len(batch[names[0]]) >= ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield batch
            batch, size = {name: [] for name in names}, 0
    if batch[names[0]]:
        yield batch


def _check_names(found: Iterable[str], columns: list[str], what: str) -> None:
    names = list(found)
    for column, setting in zip(columns, ("text_column", "id_column"), strict=False):
        if column not in names:
            raise UnsuitableError(f"{what} has no column {column!r}; it has {_listing(names)}. Set source.{setting}.")


def ask(
    what: str,
    call: Callable[[], T],
    revision: str | None,
    *,
    worn_out: type[Exception] = ValueError,
    passing: tuple[type[Exception], ...] = (),
    then: str = "",
) -> T:
    """Call *call* and return its result. Retry errors of the network, and those of *passing*.

    Other errors become one sentence with the next step, which is *then* if that is given: *worn_out* if the hub did not answer
    in ATTEMPTS tries, ValueError if it never will. Errors of the local disk are raised as they are.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    def passes(error: Exception) -> bool:
        """Whether the same request may succeed later."""
        if isinstance(error, (UnsuitableError, *passing)):
            return not isinstance(error, UnsuitableError)
        telling = _telling(error)
        if (status := own_status(telling)) is not None:
            return status in (408, 429) or status >= 500
        if isinstance(telling, OfflineModeIsEnabled):
            return False
        cut_short = type(telling) is OSError and telling.errno is None  # a download of the wrong length
        return cut_short or isinstance(telling, _network_faults())

    check_requests()
    tell = teller(logger, what, lambda error: _brief(_telling(error)))
    try:
        return retry(call, TRIES, tell, passes=passes, asked_wait=_asked_wait)
    except UnsuitableError as error:
        fault: Exception = ValueError(str(error))
    except Exception as error:
        may_pass = passes(error)
        if not may_pass and isinstance(error, OSError) and error.errno is not None:
            raise
        logger.debug("%s", what, exc_info=error)
        message = f"{what}: {_brief(_telling(error))}. {then}" if then else _explained(error, what, revision, may_pass)
        fault = (worn_out if may_pass else ValueError)(message)
    raise fault  # outside of the handler: the libraries' long traces are for the debug log


def check_requests() -> None:
    """Have all that this process asks of the hub checked, also by fsspec's client of it."""
    client = _utilities().get_session()  # one of all threads
    if _check_request not in client.event_hooks["request"]:
        ours = {"request": _check_request, "response": _bound_answer}
        client.event_hooks = {event: [*hooks, ours[event]] for event, hooks in client.event_hooks.items()}


def _check_request(request: Any) -> None:
    check_hop(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", str(request.url))
    request.headers["Accept-Encoding"] = "identity"


def _bound_answer(response: Any) -> None:
    """Limit the bytes that are read of an answer. An answer that states its size is not read beyond it."""
    url, raw = response.request.url.copy_with(query=None), response.iter_raw
    if response.request.method != "HEAD":
        check_encoding(url, response.headers)
    most = 1 << 62 if "Content-Length" in response.headers else MOST_BYTES
    response.iter_raw = lambda *arguments, **options: bounded(url, raw(*arguments, **options), most)


def _utilities() -> Any:
    """The module huggingface_hub.utils, whose exports type checkers do not see: its HTTP library among others."""
    return import_module("huggingface_hub.utils")


def _network_faults() -> tuple[type[BaseException], ...]:
    return (_utilities().httpx.TransportError, ConnectionError, TimeoutError)


def _telling(error: BaseException) -> BaseException:
    """The first error of a chain that is of the network; the outermost one if none is."""
    network = _network_faults()
    return next((link for link in causes(error, hidden=True) if own_status(link) or isinstance(link, network)), error)


def _asked_wait(error: BaseException) -> float:
    """Seconds that the hub wants us to wait: by ``Retry-After``, else until its window of requests ends."""
    telling = _telling(error)
    limit = _utilities().parse_ratelimit_headers(getattr(getattr(telling, "response", None), "headers", None) or {})
    return retry_after(telling) or (float(limit.reset_in_seconds) if limit and not limit.remaining else 0.0)


def _brief(error: BaseException) -> str:
    """An exception in one line, without the request's id."""
    lines = [re.sub(r" \(Request ID: [^)]*\)", "", line).strip().rstrip(".") for line in str(error).splitlines()]
    status = own_status(error)
    first = f"HTTP status {status}" if status else next(filter(None, lines), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _explained(error: BaseException, what: str, revision: str | None, may_pass: bool) -> str:
    """The message for a request that failed for good, with the next step."""
    from huggingface_hub import errors

    telling = _telling(error)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if may_pass:
        return (
            f"{what} cannot be had: the hub at {hub} cannot be reached or is overloaded ({_brief(telling)}). "
            "Check the network and HF_ENDPOINT, or try again later."
        )
    if isinstance(telling, errors.OfflineModeIsEnabled):
        return f"{what} cannot be had while HF_HUB_OFFLINE is set. Unset it, or name local files with source.path."
    if isinstance(telling, errors.GatedRepoError) or type(error).__name__ == "DatasetNotFoundError":
        return f"{what} is gated. Ask for access on its page, and set HF_TOKEN to a token of the account that has it."
    if isinstance(telling, errors.RevisionNotFoundError):
        return f"{what} has no revision {revision!r}. Set source.hub.revision to a branch, tag or commit of it."
    if isinstance(error, errors.RemoteEntryNotFoundError):  # deeper in the chain it is a file that one does not need
        return f"{what} has no such file at revision {revision!r} ({_brief(telling)}). Check the name."
    if isinstance(telling, errors.RepositoryNotFoundError):
        return f"there is no {what} at {hub}, or it is private. Check the name, and HF_TOKEN if it is private."
    if isinstance(error, errors.HFValidationError):
        return f"{what} is not named as on the hub, ORGANISATION/NAME. Check source.hub.path and source.hub.revision."
    if own_status(telling) in (401, 403):
        return f"the hub at {hub} refuses {what} ({_brief(telling)}). Check HF_TOKEN."
    return (
        f"{what} at revision {revision!r} cannot be read ({_brief(error)}). Name its files with source.path "
        "(hf://datasets/ORGANISATION/NAME/...), or try source.hub.revision refs/convert/parquet."
    )
