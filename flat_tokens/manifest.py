"""The manifest of a dataset: its origin, and the size and digest of every stored object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from flat_tokens.arrays.layouts import to_json
from flat_tokens.stores.store import Store, StoredObject

POINTER = "latest.json"
VERSIONS = "versions"
CACHE = "_cache"
RUNS = "runs"
"""Names below a build's output: the pointer, all versions, token shards and fetched files, records of runs."""

MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")

FORMAT_VERSION = 1
TOKEN_BYTES, ENTRY_BYTES = 4, 8


def manifest_bytes(objects: Iterable[StoredObject], totals: dict[str, Any], layout: str, provenance: dict[str, Any]) -> bytes:
    """The manifest's bytes: the dataset's origin and every object's size and digest, except the root's metadata."""
    return to_json(
        {
            "format": "flat-tokens",
            "format_version": FORMAT_VERSION,
            "layout": layout,
            "totals": totals,
            "provenance": provenance,
            "objects": [stored._asdict() for stored in sorted(objects)],
        }
    )


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest at *store*. FileNotFoundError if there is none; ValueError if it is not valid."""
    try:
        manifest = json.loads(store.read(MANIFEST))
        if manifest["format"] != "flat-tokens" or manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {manifest['format']!r}, version {manifest['format_version']!r}")
        for item in manifest["objects"]:
            types = [type(value) for value in StoredObject(**item)]
            if types != [str, int, str]:
                raise ValueError(f"an object of {types}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{store.path(MANIFEST)}: is not a manifest that is understood here ({error})") from error
    return manifest  # type: ignore[no-any-return]


class FileChanges(NamedTuple):
    """Names of a source's files that differ between two versions; *renamed* are pairs of the old and the new name."""

    came: list[str]
    went: list[str]
    changed: list[str]
    renamed: list[tuple[str, str]]


def compare_files(before: Mapping[str, str], after: Mapping[str, str]) -> FileChanges:
    """Compare the files of a source, each a name with the digest of its content. A file with the content of one that went is
    that one, renamed.
    """
    by_digest = {digest: name for name, digest in before.items() if name not in after}
    renamed = [(by_digest.pop(digest), name) for name, digest in after.items() if name not in before and digest in by_digest]
    old_names, new_names = {old for old, _ in renamed}, {new for _, new in renamed}
    return FileChanges(
        came=[name for name in after if name not in before and name not in new_names],
        went=[name for name in before if name not in after and name not in old_names],
        changed=[name for name in after if name in before and before[name] != after[name]],
        renamed=renamed,
    )
