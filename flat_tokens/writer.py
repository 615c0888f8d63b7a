"""Writing flat-tokens arrays and small datasets. Large datasets are written object by object; see ``arrays.writing``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName, group_metadata
from flat_tokens.arrays.writing import ArrayWriter, put_metadata
from flat_tokens.batch import TokenBatch
from flat_tokens.manifest import MANIFEST, manifest_bytes
from flat_tokens.stores.store import Store, StoredObject


class FlatTokensWriter:
    """Writes one flat-tokens array from its start to its end, batch by batch, in bounded memory."""

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store, self._layout = store, layout
        self._tokens = ArrayWriter(store, "encoded_tokens", layout.encoded_tokens)
        self._starts = ArrayWriter(store, "seq_starts", layout.seq_starts)
        self.seq_count = 0
        self.max_token_id = 0
        self.objects: list[StoredObject] = []

    @property
    def token_count(self) -> int:
        return self._tokens.length

    def append(self, batch: TokenBatch) -> None:
        # (batch, entry) -> (array, entry): starts shift by the tokens already written
        self._starts.append(batch.seq_starts[:-1] + np.uint64(self.token_count))
        self._tokens.append(batch.encoded_tokens)
        self.seq_count += batch.seq_count
        self.max_token_id = max(self.max_token_id, batch.max_token_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        both = ExitStack()  # a failure in one array reaches the other
        both.push(self._starts)
        both.push(self._tokens)
        if kind is not None:
            both.__exit__(kind, error, traceback)
            return
        with both:
            self._starts.append(np.array([self.token_count], np.uint64))
        self.objects = [*self._tokens.objects, *self._starts.objects]
        attributes = {"max_token_id": self.max_token_id}
        self.objects += put_metadata(self._store, "", group_metadata(self._layout.zarr_format, attributes))


def write_dataset(
    path_or_url: str | os.PathLike[str],
    train: Iterable[TokenBatch],
    validation: Iterable[TokenBatch] = (),
    *,
    layout: LayoutName = "mmap",
    provenance: dict[str, Any] | None = None,
) -> Store:
    """Write a dataset to an empty path or URL, the root group's metadata last.

    FileExistsError if something is there already.
    """
    store, chosen = Store.at(path_or_url), LAYOUTS[layout]
    if store.exists(""):
        raise FileExistsError(f"{store.url}: exists already. A dataset is written once; choose another path.")
    objects, totals = [], {}
    for split, batches in (("train", train), ("validation", validation)):
        with FlatTokensWriter(store / split, chosen) as writer:
            for batch in batches:
                writer.append(batch)
        objects += [stored._replace(key=f"{split}/{stored.key}") for stored in writer.objects]
        totals[split] = {
            "token_count": writer.token_count,
            "seq_count": writer.seq_count,
            "max_token_id": writer.max_token_id,
        }
    store.put(MANIFEST, manifest_bytes(objects, totals, layout, provenance or {}))
    commit(store, chosen)
    return store


def commit(store: Store, layout: Layout) -> None:
    """Publish the arrays at *store*: from now on readers, plain zarr ones included, see a dataset."""
    put_metadata(store, "", group_metadata(layout.zarr_format, {}))
