"""Prefect's result cache, fed from the receipts of token shards.

Prefect looks a task's cache key up in a result store and believes what it finds: a stored record names its own
serializer, so whoever can write one can run code. Here nothing that Prefect writes is kept. What it reads under a key is
made on the spot from the receipt in storage, which is our own JSON and checked against every byte of the shard: one truth,
the same with and without a server, on every machine that sees the storage.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from prefect.context import FlowRunContext
from prefect.filesystems import WritableFileSystem
from prefect.results import ResultRecord, ResultRecordMetadata
from prefect.serializers import JSONSerializer
from pydantic import PrivateAttr

from flat_tokens.stores.store import Store
from tasks.models import digest_of
from tasks.progress import Done, meter
from tasks.shards.index import VersionNames, indexed_versions, load_or_published

PACKS_KEPT = 1024
"""Of so many tasks of several shards it is known which shards they are: Prefect looks a task up as soon as it has its key."""

_packs: OrderedDict[str, tuple[str, ...]] = OrderedDict()


def key_of_pack(keys: Sequence[str]) -> str:
    """The key of a task of several shards. Prefect's limit of 2,000 characters has room for only some thirty keys, so the key
    is a digest of them, and this process remembers which.
    """
    if len(keys) == 1:
        return keys[0]
    key = digest_of("pack", *keys)
    _packs[key] = tuple(keys)
    while len(_packs) > PACKS_KEPT:
        _packs.popitem(last=False)
    return key


class ReceiptStorage(WritableFileSystem):
    """A result storage whose records are the receipts at an output."""

    _root: Store = PrivateAttr()
    _versions: VersionNames = PrivateAttr()
    _checked: dict[str, tuple[bytes, Done]] = PrivateAttr(default_factory=dict)

    @classmethod
    def at(cls, root: Store) -> Self:
        storage = cls()
        storage._root, storage._versions = replace(root, read_once=True), indexed_versions(root)
        return storage

    def read_path(self, path: str, **_: Any) -> bytes:  # type: ignore[override]  # Prefect calls it with _sync=True
        """The record of a task's shards. ValueError, which Prefect takes for a miss, if one is not there or is damaged."""
        # Prefect asks whether a record exists by reading it, and then reads it: one check of the shards is enough for both.
        if path in self._checked:
            record, done = self._checked.pop(path)
            meter.add("tokenize", *done)
            return record
        shards = []
        for key in _packs.get(path, (path,)):
            shard = load_or_published(self._root, self._versions, key)
            if shard is None:
                raise ValueError(f"there is no receipt {key}")
            shards.append(shard)
        metadata = ResultRecordMetadata(serializer=JSONSerializer(), storage_key=path)
        record = ResultRecord(result=shards, metadata=metadata).serialize()
        counts = [(shard.text_bytes, shard.read, shard.token_count, 0, shard.text_bytes) for shard in shards]
        self._checked[path] = record, Done(*map(sum, zip(*counts, strict=True)))
        return record

    def _resolve_path(self, path: str) -> None:
        """Keys are keys, not paths of this machine."""

    def write_path(self, path: str, content: bytes, **_: Any) -> None:  # type: ignore[override]
        """Write nothing: the task has written the receipt, and only a receipt counts."""

    async def aread_path(self, path: str) -> bytes:
        return self.read_path(path)

    async def awrite_path(self, path: str, content: bytes) -> None:
        self.write_path(path, content)


@contextlib.contextmanager
def results_from_receipts(root: Store) -> Iterator[None]:
    """Within a flow run: its tasks' results are looked up among the receipts at an output."""
    context = FlowRunContext.get()
    assert context is not None
    store = context.result_store.model_copy(update={"result_storage": ReceiptStorage.at(root)})
    with context.model_copy(update={"result_store": store}):
        yield
