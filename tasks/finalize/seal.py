"""Sealing a version: metadata, manifest, card, check, and last the commit."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName, group_metadata
from flat_tokens.arrays.writing import put_metadata
from flat_tokens.checker import bytes_to_check, check_objects, check_split
from flat_tokens.manifest import MANIFEST, SPLITS, manifest_bytes
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.writer import commit
from tasks.finalize.card import CARD
from tasks.output.paths import DOCUMENTS, version_store
from tasks.progress import meter
from tasks.shards.read import document_spec
from tasks.split.write import DOCUMENT_ARRAYS, Written


def is_published(root: Store, version: str, layout: LayoutName) -> bool:
    """Whether a version is complete: its root group's metadata is written last."""
    marker = list(group_metadata(LAYOUTS[layout].zarr_format, {}))[-1]
    return version_store(root, version).exists(marker)


def seal(
    store: Store,
    layout: LayoutName,
    made_of: dict[str, Any],
    totals: dict[str, Any],
    written: Sequence[Written],
    described: str,
    verify_level: str,
) -> dict[str, Any]:
    """Complete a version whose arrays are written: metadata, card (*described*), manifest, check, commit. Return the manifest."""
    chosen = LAYOUTS[layout]
    objects = [stored for part in written for stored in part.objects]
    for split in SPLITS:
        objects += _split_metadata(store, split, chosen, totals[split])
    objects.append(store.put(CARD, described.encode()))
    manifest = manifest_bytes(objects, totals, layout, made_of)
    store.put(MANIFEST, manifest)
    check_version(store, objects, totals, verify_level)
    commit(store, chosen)
    value: dict[str, Any] = json.loads(manifest)
    return value


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
