"""Files uploaded to a dataset repository of the Hugging Face hub: only those that it does not have, in several commits, the tag
of the version last. A bucket has no commits: each version has a directory of its own, and the card comes last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.extras import extra
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.retry import own_status
from tasks.download.hub import UnsuitableError, api, ask

logger = logging.getLogger(__name__)

FILES_A_COMMIT = 100
BYTES_A_COMMIT = 5 << 30
CARD = "README.md"
BUCKETS = "buckets/"
DATA, ZARR = "data", "zarr"
OURS = re.compile(rf"{DATA}/((train|validation|test)-\d+-of-\d+\.parquet|\.export/.+)|{ZARR}/.+")
"""Files of a repository that a publication may have put there, and the next one removes. Nobody else's are touched."""


class HubFile(NamedTuple):
    """A file on the local disk and its path in the repository."""

    path: str
    local: Path
    size: int
    sha256: str


class UploadResult(NamedTuple):
    """Result of an upload. ``commit``: that of the tag. ``uploaded``, ``byte_count``: files that the repository did not have."""

    url: str
    commit: str
    files: int
    uploaded: int
    byte_count: int
    removed: int
    was_done: bool


def upload(
    repo: str,
    files_of: Callable[[], Sequence[HubFile]],
    card: bytes,
    tag: str,
    private: bool | None,
    done: Callable[[int], object],
) -> UploadResult:
    """Make files and a card the content of a repository, and tag it; or, in a bucket, of a directory with the tag's name. Run
    again, it resumes after the last commit.

    *files_of* is called if there is no such tag yet. The repository is made if it is not there; *private* decides for whom.
    *done* is called with the bytes of each commit. ValueError if the hub does not let this account write, or does not answer.
    """
    hub, bucket = api(), repo.removeprefix(BUCKETS) if repo.startswith(BUCKETS) else ""
    on_hub = partial(_write, repo, f"bucket {bucket}" if bucket else f"dataset {repo}", tag)

    if not bucket:
        on_hub(lambda: hub.create_repo(repo, repo_type="dataset", private=private, exist_ok=True))
        url = f"{hub.endpoint}/datasets/{repo}"
        refs = on_hub(lambda: hub.list_repo_refs(repo, repo_type="dataset"))
        tagged = [one.target_commit for one in refs.tags if one.name == tag]
        write = partial(hub.create_commit, repo, repo_type="dataset")
    else:
        url = on_hub(lambda: hub.create_bucket(bucket, private=private, exist_ok=True)).url
        listed = on_hub(lambda: list(hub.list_bucket_tree(bucket, tag, recursive=True)))
        there = {one.path.removeprefix(f"{tag}/"): one for one in listed if one.type == "file"}
        tagged = [""] if CARD in there else []
        write = partial(hub.batch_bucket_files, bucket)
    if tagged:
        return UploadResult(url, tagged[0], 0, 0, 0, 0, was_done=True)

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete  # takes a quarter of a second
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # the stage has one

    files = files_of()
    if not bucket:
        listed = on_hub(lambda: list(hub.list_repo_tree(repo, recursive=True, repo_type="dataset")))
        there = {one.path: one for one in listed if isinstance(one, RepoFile)}
    new = [file for file in files if not _is_there(file, there.get(file.path))]
    done(sum(file.size for file in files) - sum(file.size for file in new))
    parts = list[list[HubFile]]()  # the files of each commit
    for file in new:
        if not parts or len(parts[-1]) == FILES_A_COMMIT or sum(one.size for one in parts[-1]) + file.size > BYTES_A_COMMIT:
            parts.append([])
        parts[-1].append(file)
    for number, part in enumerate(parts, 1):
        if not bucket:
            operations = [CommitOperationAdd(file.path, str(file.local)) for file in part]
            message = f"Version {tag}, part {number} of {len(parts)}"
            on_hub(partial(write, operations, commit_message=message))
        else:
            on_hub(partial(write, add=[(str(file.local), f"{tag}/{file.path}") for file in part]))
        done(sum(file.size for file in part))
    commit, stale = "", list[str]()
    if not bucket:
        stale = sorted(path for path in there if OURS.fullmatch(path) and path not in {file.path for file in files})
        last = [CommitOperationAdd(CARD, card), *(CommitOperationDelete(path, is_folder=False) for path in stale)]
        commit = on_hub(partial(write, last, commit_message=f"Version {tag}")).oid
        on_hub(lambda: hub.create_tag(repo, tag=tag, revision=commit, repo_type="dataset", exist_ok=True))
    else:
        for path in (CARD, f"{tag}/{CARD}"):
            on_hub(partial(write, add=[(card, path)]))
    return UploadResult(url, commit, len(files), len(new), sum(file.size for file in new), len(stale), was_done=False)


def _write(repo: str, what: str, tag: str, call: Callable[[], Any]) -> Any:
    """The result of a call that writes. ValueError if the hub does not let this account write."""

    def permitted() -> Any:
        try:
            return call()
        except Exception as error:
            if (status := own_status(error)) not in (401, 403):
                raise
            account = "the account of HF_TOKEN" if os.environ.get("HF_TOKEN") else "anybody without a token"
            raise UnsuitableError(
                f"{repo}: the hub does not let {account} write here (status {status}). Set HF_TOKEN to a token with write access."
            ) from error

    then = "Run the same again: what the hub has is not sent again."
    return ask(what, permitted, tag, passing=(RuntimeError,), then=then)  # as the client of chunks says


def files_below(directory: Path, folder: str) -> Iterator[HubFile]:
    """The files below a directory, for a *folder* of the repository. No link is followed."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with open_plain(path) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            yield HubFile(f"{folder}/{path.relative_to(directory).as_posix()}", path, path.stat().st_size, sha256)


def _is_there(file: HubFile, there: Any) -> bool:
    """Whether the hub has a file, by its digest there: git's of small files, sha256 of others, Xet's in buckets."""
    if there is None or there.size != file.size:
        return False
    if not hasattr(there, "lfs"):
        return bool(extra("hf_xet", "a bucket").hash_files([str(file.local)])[0].hash == there.xet_hash)
    if there.lfs is not None:
        return bool(there.lfs.sha256 == file.sha256)
    digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open_plain(file.local) as opened:
        digest.update(opened.read())
    return bool(there.blob_id == digest.hexdigest())
