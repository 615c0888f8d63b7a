"""Names of what lies at an output. Those that readers know as well are from ``flat_tokens.manifest``."""

from __future__ import annotations

from flat_tokens.manifest import CACHE as CACHE
from flat_tokens.manifest import RECEIPT as RECEIPT
from flat_tokens.manifest import RUNS as RUNS
from flat_tokens.manifest import VERSIONS as VERSIONS
from flat_tokens.stores.store import Store

DOCUMENTS = "documents"
"""Below a token shard or a version: the arrays with an entry a document."""

FILES = f"{CACHE}/files"
STAGING = "_staging"
QUARANTINE = "_quarantine"
RUNNING = "_running"
GROUPS = "_groups"
ORIGINS = "origins"
PINS = "pins"


def version_key(version: str) -> str:
    """Where a version lies below its output."""
    return f"{VERSIONS}/{version}"


def version_store(root: Store, version: str) -> Store:
    """The dataset of a version; its ``url`` is the path or URL that people are told."""
    return root / VERSIONS / version


def shard_key(key: str) -> str:
    """Where the token shard of that key lies below its output."""
    return f"{CACHE}/{key}"


def receipt_key(key: str) -> str:
    """Where the receipt of a token shard lies."""
    return f"{CACHE}/{key}/{RECEIPT}"


def origin_key(version: str) -> str:
    """Where it is recorded from which settings and files a version came."""
    return f"{ORIGINS}/{version}.json"


def pin_key(version: str) -> str:
    """Where it is recorded that a version is pinned."""
    return f"{PINS}/{version}.json"
