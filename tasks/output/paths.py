"""Names of what is at an output. Those that readers share are from ``flat_tokens.manifest``."""

from __future__ import annotations

import shlex

from flat_tokens.forgotten import DIRECTORY as FORGOTTEN_DIRECTORY
from flat_tokens.manifest import BESIDE as BESIDE
from flat_tokens.manifest import CACHE as CACHE
from flat_tokens.manifest import EXPORTS as EXPORTS
from flat_tokens.manifest import LINK, POINTER
from flat_tokens.manifest import LOCK as LOCK
from flat_tokens.manifest import RECEIPT as RECEIPT
from flat_tokens.manifest import RUNS as RUNS
from flat_tokens.manifest import VERSIONS as VERSIONS
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import Store
from tasks.models import LEFT_OUT
from tasks.rows import OF_PLACE

FORGOTTEN = FORGOTTEN_DIRECTORY
DOCUMENTS = "documents"
"""Below a token shard or a version: the arrays with an entry a document."""

FILES = f"{CACHE}/files"
INDEX = f"{CACHE}/index"
"""Below it, what each version holds of slices and segments."""
TEXTS = "texts"
"""Below what a version left out: for each split, arrays of the facts of its texts."""
SETS = f"{CACHE}/sets"
"""Below it, evaluation sets by their digests, for the workers of builds."""
UNFINISHED = f"{CACHE}/unfinished"
"""Below it, for each attempt, objects of its version that are not whole yet, and hold tokens that are nowhere else."""
STAGING = "_staging"
QUARANTINE = "_quarantine"
RUNNING = "_running"
GROUPS = "_groups"
ORIGINS = "origins"
REFRESHES = f"{RUNS}/refreshes.jsonl"
PROBE = ".probe"

DIRECTORIES = (
    VERSIONS,
    CACHE,
    FILES,
    INDEX,
    BESIDE,
    SETS,
    UNFINISHED,
    RUNS,
    STAGING,
    QUARANTINE,
    RUNNING,
    GROUPS,
    ORIGINS,
    FORGOTTEN,
    EXPORTS,
)
KINDS = {
    **dict.fromkeys(DIRECTORIES, "directory"),
    **dict.fromkeys((POINTER, LOCK), "file"),
    LINK: "link",
}


def check_places(root: Store) -> None:
    """Refuse an output of a checkout that kept more records than the pointer, and a local one if something else is in place of
    what it consists of, such as a link of a directory.
    """
    for name in ("held.json", "pins"):
        if root.exists(name):
            raise ValueError(
                f"{root.path(name)}: is of an earlier checkout. Pins and the version that waits are in {POINTER} now. Move it "
                f"away, and pin the versions again: python -m flows pin {shlex.quote(root.url)} VERSION"
            )
    for name, kind in KINDS.items() if root.is_local else ():
        if (found := kind_of(root.path(name), follow_links=False)) not in (None, kind):
            raise ValueError(f"{root.path(name)}: is a {found} instead of a {kind}. Move it away and run again.")


def version_key(version: str) -> str:
    """Key of a version below its output."""
    return f"{VERSIONS}/{version}"


def version_store(root: Store, version: str) -> Store:
    """The store of a version. Its ``url`` is the path or URL that people see."""
    return root / VERSIONS / version


def shard_key(key: str) -> str:
    """Key of the token shard with this key, below its output."""
    return f"{CACHE}/{key}"


def receipt_key(key: str) -> str:
    """Key of a token shard's receipt."""
    return f"{CACHE}/{key}/{RECEIPT}"


def unfinished_key(attempt: str, split: str, name: str, number: int) -> str:
    """Key of an object of the array *name* that an attempt has not finished."""
    return f"{UNFINISHED}/{attempt}/{split}-{number}" + (f"-{name}" if name != "encoded_tokens" else "")


def index_key(version: str) -> str:
    """Key of the index of a version's slices and segments."""
    return f"{INDEX}/{version}.json"


def beside_key(version: str) -> str:
    """Key of what a version left out."""
    return f"{BESIDE}/{version}"


def home_key(version: str, split: str) -> str:
    """Key of the directory that has a split of a version."""
    return beside_key(version) if split == LEFT_OUT else version_key(version)


def fact_key(version: str, split: str, name: str) -> str:
    """Key of the array of a fact of the documents of a split of a version."""
    if name in OF_PLACE:
        return f"{home_key(version, split)}/{DOCUMENTS}/{split}/{name}"
    return f"{beside_key(version)}/{TEXTS}/{split}/{name}"


def origin_key(version: str) -> str:
    """Key of the record of the settings and files that a version came from."""
    return f"{ORIGINS}/{version}.json"
