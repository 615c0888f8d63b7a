"""Importing: token sequences in a neighbour's format become token shards, as if they had been tokenized here."""

from __future__ import annotations

import functools
import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from flat_tokens.annotations import Bools, JsonObject, UInt64s
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import LOSS_MASK, TOKEN_ARRAYS, TOKENS, TokenBatch
from flat_tokens.formats import FLAT_TOKENS, FoundDataset, Readable, open_any
from flat_tokens.formats.contract import split_of
from flat_tokens.keys import concatenated, token_keys
from flat_tokens.manifest import EVERY_SPLIT, TEST, SplitName
from flat_tokens.rows.split import ahead
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.corpus import open_corpus, options_of
from tasks.derive.request import ImportRequest
from tasks.finalize.provenance import Provenance, tokenizer_facts
from tasks.locations import Location
from tasks.models import FORMAT_SEMANTICS, Model, TokenShard, as_name, digest_of
from tasks.output.forgotten import forgotten_at
from tasks.output.leases import Workspace
from tasks.parts.opening import open_shard
from tasks.progress import meter
from tasks.rows import KEY, ROW
from tasks.shards.index import VersionNames, load_or_published
from tasks.shards.receipts import write_shard
from tasks.shards.writers import staging_shard
from tasks.text.files import stamp
from tasks.tokenize.engines import Tokenizer

PART_BYTES = 1 << 27
"""About how many bytes of files one task imports."""
ROWS_AT_A_TIME = 1 << 20


class ImportPart(Model):
    """Sequences ``start:stop`` of one split of files that are known by a digest. ``tokenizer``: the digest of the tokenizer, if
    there is a record of it. ``masked``: whether the files say which tokens count. ``forgotten``: digest of the output's list of
    documents that are left out.
    """

    path: Location
    format: str
    options: JsonObject
    content: str
    tokenizer: str | None
    split: SplitName
    start: int
    stop: int
    masked: bool = False
    forgotten: str = ""

    @property
    def label(self) -> str:
        return f"{posixpath.basename(self.path.rstrip('/'))} {self.split} {self.start:,} to {self.stop:,}"

    def inputs(self) -> dict[str, object]:
        """Everything that the shard's bytes depend on."""
        return {
            "content": self.content,
            "format": self.format,
            "options": self.options,
            "range": (self.split, self.start, self.stop),
            "tokenizer": self.tokenizer or "",
            "semantics": FORMAT_SEMANTICS,
            **({"loss_mask": True} if self.masked else {}),
        }


def open_import(path: str, format: str | None, options: JsonObject) -> FoundDataset:
    """Open the files at a path. ValueError if they are a dataset already."""
    format = format or (open_any(path).format if options else None)
    opened = open_any(path, format, options_of(format, options) if format and options else None)
    if opened.format == FLAT_TOKENS and len(opened.splits) > 1:
        raise ValueError(
            f"{path}: is a flat-tokens dataset already. python -m flows relayout copies it, with its documents' keys."
        )
    return opened


@functools.lru_cache(8)
def _opened(path: str, format: str, options: str, content: str) -> FoundDataset:
    """Open once for all parts: finding where documents begin may read all files. *content* is the files' digest."""
    return open_import(path, format, json.loads(options))


def digest_file(key: str, url: str) -> StoredObject:
    """Size and digest of a file below a directory."""
    return Store.at(url).digest(key, "sha256", functools.partial(meter.add, "examine"))


def parts_of(
    request: ImportRequest, opened: FoundDataset, stored: Sequence[StoredObject], tokenizer: str | None, forgotten: str = ""
) -> list[ImportPart]:
    """Cut each split into parts of about ``PART_BYTES`` of files, with about as many sequences each. *forgotten*: the digest of
    the output's list.
    """
    part: JsonObject = {"path": request.path, "format": opened.format, "options": request.options, "tokenizer": tokenizer}
    part["forgotten"] = forgotten
    part["content"] = digest_of(*map(list, sorted(stored)))  # in any order
    parts = []
    for split in (split for split in EVERY_SPLIT if split in opened.splits):
        count = opened.splits[split].seq_count
        cuts = min(max(1, -(-sum(one.size for one in of_split(split, opened, stored)) // PART_BYTES)), max(count, 1))
        for start, stop in pairwise(count * i // cuts for i in range(cuts + 1)):
            parts.append(ImportPart(**part, split=split, start=start, stop=stop, masked=reads_mask(opened, split)))
    return parts


def of_split(split: SplitName, opened: FoundDataset, stored: Sequence[StoredObject]) -> list[StoredObject]:
    """The files of a split, reported by their names."""
    return (
        list(stored) if len(opened.splits) == 1 else [one for one in stored if split_of(one.key, TEST in opened.splits) == split]
    )


def import_part(part: ImportPart, workspace: Workspace, versions: VersionNames = ()) -> TokenShard:
    """The tokens of a part: those that are stored or that a version holds, if they are complete, else written now."""
    key = digest_of(part.inputs())
    stored = load_or_published(workspace.root, versions, key)
    if stored is not None and part.forgotten:
        documents = open_shard(workspace.root, stored)
        stored = None if _are_forgotten(part, documents.keys, documents.fact(ROW), workspace).any() else stored
    if stored is not None:
        meter.add("import", 4 * stored.token_count, stored.read, stored.token_count, stored=4 * stored.token_count)
        return stored
    opened = _opened(part.path, part.format, json.dumps(part.options, sort_keys=True), part.content)
    return write_shard(_make_shard(part, key, opened.splits[part.split], workspace), workspace)


def reads_mask(opened: FoundDataset, split: SplitName) -> bool:
    """Whether the loss mask of a split is made of files of another format, as earlier releases did not."""
    return opened.format != FLAT_TOKENS and LOSS_MASK in token_arrays_of([opened.splits[split]])


def token_arrays_of(splits: Iterable[Readable]) -> tuple[str, ...]:
    """The token arrays that splits in some format have, one or the other."""
    there = [name for name in TOKEN_ARRAYS if any(getattr(split, name, None) is not None for split in splits)]
    return (TOKENS, *(name for name in there if name != TOKENS))


@functools.lru_cache(8)
def _recorded_keys(path: str, format: str, options: str, content: str, split: SplitName) -> StoredArray | None:
    """The keys of a split's documents by the record of an export of ours; None if there is none."""
    documents = open_corpus(path, format, json.loads(options)).documents(split)
    return None if documents is None else documents.key


def _are_forgotten(part: ImportPart, keys: UInt64s, rows: UInt64s, workspace: Workspace) -> Bools:
    """Which sequences of a part the output has forgotten, by the keys of their tokens, uint64[n], and by those that an export has
    recorded of *rows* of the part, uint64[n]: bool[n].
    """
    forgotten = forgotten_at(workspace.root, part.forgotten)
    recorded = _recorded_keys(part.path, part.format, json.dumps(part.options, sort_keys=True), part.content, part.split)
    gone = forgotten.those_or_text(keys)
    return gone if recorded is None else gone | forgotten.those(recorded.take(rows.astype(np.int64) + part.start))


def _make_shard(part: ImportPart, key: str, sequences: Readable, workspace: Workspace) -> TokenShard:
    """Write the sequences of a part that are not forgotten as a token shard in the staging directory."""
    read, runs = part.stop - part.start, np.array([(part.start, part.stop)], np.int64)
    if part.forgotten:
        keys = concatenated(token_keys(ahead(sequences.batches(part.start, part.stop))))
        kept = ~_are_forgotten(part, keys, np.arange(len(keys), dtype=np.uint64), workspace)
        runs = np.flatnonzero(np.diff(kept, prepend=False, append=False)).reshape(-1, 2) + part.start
    count = int(np.diff(runs).sum())
    with staging_shard(key, workspace, (KEY, ROW), token_arrays_of([sequences])) as writer:

        def written() -> Iterator[TokenBatch]:
            for start, stop in runs.tolist():
                for batch in ahead(sequences.batches(start, stop)):
                    writer.tokens.append(batch)
                    meter.add("import", batch.encoded_tokens.nbytes, batch.seq_count, batch.token_count)
                    yield batch

        for keys in token_keys(written()):
            writer.facts[KEY].append(keys)
        for first, last in (runs - part.start).tolist():
            for start in range(first, last, ROWS_AT_A_TIME):
                writer.facts[ROW].append(np.arange(start, min(start + ROWS_AT_A_TIME, last), dtype=np.uint64))
    if writer.tokens.seq_count != count:
        raise ValueError(f"{part.path}: {part.split} has {writer.tokens.seq_count} sequences from {part.start} to {part.stop}")
    counts = {"rows": read, "read": read, "written": count}
    skipped = {"forgotten": read - count} if read > count else {}
    return TokenShard(key=key, inputs=part.inputs(), text_bytes=0, **counts, skipped=skipped, replaced={}, **writer.stored)


def provenance(
    request: ImportRequest, opened: FoundDataset, stored: Sequence[StoredObject], tokenizer: Tokenizer | None
) -> Provenance:
    """The provenance of an imported version. Each split is a file of its one source, and each sequence a row of that."""
    files = []  # the format alone knows which real files hold a sequence
    for split in (split for split in EVERY_SPLIT if split in opened.splits):
        mine = of_split(split, opened, stored)
        name, sha256 = (mine[0].key, mine[0].digest) if len(mine) == 1 else (split, digest_of(*map(list, mine)))
        parts = [one.described() for one in mine]
        files.append({"name": name, "size": sum(one.size for one in mine), "sha256": sha256, "split": split, "parts": parts})
    name = request.name or as_name(posixpath.basename(request.path.rstrip("/")), "import")
    source = {"name": name, "from": f"{opened.format} files", "revision": None, "format": opened.format}
    if masked := [split for split in EVERY_SPLIT if split in opened.splits and reads_mask(opened, split)]:
        named = getattr(opened.splits[masked[0]], "loss_mask", None)
        source["loss_mask"] = named if opened.format in ("parquet", "arrow") else "labels"
    return Provenance(
        name=name,
        sources=({**source, "options": request.options, "files": files},),
        tokenizer=tokenizer_facts(tokenizer) if tokenizer else {"digest": None},
        documents={},
        split={"validation_fraction": request.validation_fraction or 0.0, "seed": request.split_seed},
    )


def stamps(store: Store, keys: Sequence[str]) -> list[tuple[int, ...]]:
    """Values that change when somebody writes to local files; taken without reading them."""
    return [stamp(store.path(key)) if store.is_local else (store.size(key),) for key in keys]
