"""Finalizing a version, whatever it is made of: totals, metadata, card, manifest, check, and last the commit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName, group_metadata
from flat_tokens.arrays.writing import put_metadata
from flat_tokens.checker import bytes_to_check, check_objects, check_split
from flat_tokens.manifest import MANIFEST, SPLITS, manifest_bytes
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.writer import commit
from tasks.finalize.provenance import CARD, Provenance
from tasks.finalize.totals import repeated_keys, split_totals
from tasks.output.paths import DOCUMENTS, version_store
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.read import document_spec
from tasks.split.spans import Span
from tasks.split.write import DOCUMENT_ARRAYS, Written


def is_published(root: Store, version: str, layout: LayoutName) -> bool:
    """Whether a version is complete: its root group's metadata is written last."""
    marker = list(group_metadata(LAYOUTS[layout].zarr_format, {}))[-1]
    return version_store(root, version).exists(marker)


class Contents(NamedTuple):
    """All that a version is made of, its objects of tokens and documents written.

    ``documents``: totals of its documents, given how many have the key of another. ``card``: the dataset card, given
    ``made_of``, ``layout``, the totals and the version.
    """

    made_of: Provenance
    layout: LayoutName
    spans: Sequence[Span]
    written: Sequence[Written]
    documents: Callable[[int], dict[str, Any]]
    card: Callable[[Any, LayoutName, dict[str, Any], str], str]


def finalize(version: str, contents: Contents, place: Place, verify_level: str) -> str:
    """Write metadata, card and manifest of a version whose arrays are written, check it, commit it. Return its name."""
    store, layout = version_store(place.root, version), contents.layout
    totals = split_totals(contents.spans, contents.written)
    totals["documents"] = contents.documents(repeated_keys(store, layout, totals, Path(place.staging)))
    objects = [stored for part in contents.written for stored in part.objects]
    for split in SPLITS:
        objects += _split_metadata(store, split, LAYOUTS[layout], totals[split])
    objects.append(store.put(CARD, contents.card(contents.made_of, layout, totals, version).encode()))
    store.put(MANIFEST, manifest_bytes(objects, totals, layout, contents.made_of.model_dump()))
    check_version(store, objects, totals, verify_level)
    commit(store, LAYOUTS[layout])
    return version


def _split_metadata(store: Store, split: str, layout: Layout, totals: dict[str, int]) -> list[StoredObject]:
    arrays = {
        f"{split}/encoded_tokens": (layout.encoded_tokens, totals["token_count"]),
        f"{split}/seq_starts": (layout.seq_starts, totals["seq_count"] + 1),
        **{f"{DOCUMENTS}/{split}/{name}": (document_spec(layout), totals["seq_count"]) for name in DOCUMENT_ARRAYS},
    }
    stored = [o for name, (spec, length) in arrays.items() for o in put_metadata(store, name, spec.metadata(length))]
    attributes = {"max_token_id": totals["max_token_id"]}
    return [*stored, *put_metadata(store, split, group_metadata(layout.zarr_format, attributes))]


def check_version(store: Store, objects: list[StoredObject], totals: dict[str, Any], level: str) -> None:
    """Check a version before it is published. ValueError names every fault, up to ten."""
    # The marker may be there: another process that builds the same may have been faster.
    besides = {MANIFEST, *group_metadata(2, {}), *group_metadata(3, {})}
    seen = None
    if level == "full":
        meter.begin("verify", bytes_to_check(store))
        seen = functools.partial(meter.add, "verify")
    faults = list(check_objects(store, sorted(objects), besides, "full" if level == "full" else "quick", 2, seen))
    for name in SPLITS:
        split = open_split(store / name)
        if (split.token_count, split.seq_count) != (totals[name]["token_count"], totals[name]["seq_count"]):
            faults.append(f"{name} has {split.token_count} tokens in {split.seq_count} sequences, not {totals[name]}")
        if level == "full":
            faults += check_split(split, seen)
    if faults:
        raise ValueError(f"{store.url} is not what was written; nothing was published: {'; '.join(faults[:10])}")
