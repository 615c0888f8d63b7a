"""Inputs: the datasets that others are made of. Where a version is, its counts, its tokenizer and its sources; cutting inputs
into parts, and lists of documents.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from pydantic import Field

from flat_tokens.annotations import JsonObject, UInt64s
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.batch import TOKEN_ARRAYS, TOKENS, TokenBatch
from flat_tokens.checker import bytes_to_check, check_split, verify
from flat_tokens.columns import columns_of
from flat_tokens.formats.contract import bounded_batches, sequence_ranges
from flat_tokens.keys import concatenated, keys_of_bytes, token_keys
from flat_tokens.manifest import SplitName, TokenBytes, manifest_digest, manifest_of, read_token_bytes, splits_of
from flat_tokens.reader import open_root, open_split, open_splits
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store, StoredObject, file_at, stored_object
from flat_tokens.tools.corpus import open_corpus, run_of
from tasks.derive.request import ForgetRequest, Subset
from tasks.models import ALL_SPLITS, FORGOTTEN, Model, as_name, digest_of
from tasks.output.paths import DOCUMENTS, VERSIONS
from tasks.output.target import Target
from tasks.parts.input import open_input
from tasks.parts.part import InputPart
from tasks.progress import meter
from tasks.rows import OF_PLACE, OF_VERSION

READERS = 4
SEEN = partial(meter.add, "examine")
FOREIGN = "a flat-tokens dataset without record of its documents"


class Input(Model):
    """A version of a dataset, identified by a digest: it stays as it is now. ``location``: path or URL of the version itself,
    whatever ``latest`` points at later. ``version``: its name in the output that it belongs to. ``digest``: of its manifest;
    without one, of all that is stored of its splits. ``tokenizer``: as its manifest has it; empty if there is no record.
    ``documents``: the policy for bad ones. ``split``: how validation was chosen. ``token_arrays``: those that a split has.
    ``columns``: the kinds of the columns that it keeps. ``stored_facts``: of each sequence, as far as they are stored.
    ``has_documents``: whether key, file and row of each sequence are stored.
    """

    location: str
    name: str
    version: str | None = None
    manifest_sha256: str | None = None
    digest: str
    layout: LayoutName | None = None
    tokenizer: JsonObject = Field({})
    documents: JsonObject | None = None
    split: JsonObject | None = None
    sources: tuple[JsonObject, ...]
    text_bytes: int | None = None
    seq_counts: dict[SplitName, int]
    token_counts: dict[SplitName, int]
    token_arrays: tuple[str, ...] = (TOKENS,)
    columns: dict[str, str] = Field({})
    stored_facts: tuple[str, ...] = OF_VERSION
    has_documents: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.version or self.digest[:16]})"

    def facts(self) -> JsonObject:
        """The input as the derived manifest records it, without its location."""
        named = self.model_dump(include={"name", "version", "manifest_sha256", "digest", "tokenizer"})
        return {**named, "seq_counts": self.seq_counts, "token_counts": self.token_counts}


def examine(path_or_url: str) -> Input:
    """Examine a dataset that is to be an input. If it has no manifest, all of it is read, for its digest and to check its
    format. FileNotFoundError if there is nothing; ValueError if it is something else or damaged.
    """
    store, _ = open_root(Store.at(path_or_url))
    if manifest := manifest_of(store):
        verify(store.url)
    splits = open_splits(store)
    known = _of_manifest(store, splits, manifest) if manifest else _of_content(store, splits)
    return Input(
        location=store.url,
        seq_counts={name: split.seq_count for name, split in splits.items()},
        token_counts={name: split.token_count for name, split in splits.items()},
        token_arrays=tuple(name for name in TOKEN_ARRAYS if any(name in split.arrays for split in splits.values())),
        **known,
    )


def _of_manifest(store: Store, splits: dict[SplitName, FlatTokens], manifest: JsonObject) -> JsonObject:
    """The facts of an input that has a manifest."""
    made_of = manifest["provenance"]
    tokenizer = made_of.get("tokenizer") or {}
    digest = manifest_digest(store)
    above, _, version = store.root.rpartition("/")
    name = made_of.get("name") or _name_of(store)
    objects = [stored_object(item) for item in manifest["objects"]]
    stored = {
        split: [one._replace(key=one.key.removeprefix(f"{split}/")) for one in objects if one.key.startswith(f"{split}/")]
        for split in splits
    }
    has_documents = False
    with contextlib.suppress(FileNotFoundError):
        has_documents = bool(made_of.get("sources")) and all(map(open_corpus(store.url).documents, splits))
    return {
        "name": name,
        "version": version if above.rpartition("/")[2] == VERSIONS else None,
        "manifest_sha256": digest,
        "digest": digest,
        "layout": manifest["layout"],
        "tokenizer": tokenizer if None not in map(tokenizer.get, ("name", "digest", "highest_id")) else {},
        "documents": {name: of for name, of in (made_of.get("documents") or {}).items() if name != FORGOTTEN},
        "split": made_of.get("split"),
        "sources": tuple(made_of["sources"]) if has_documents else (_as_source(name, stored),),
        "text_bytes": (manifest["totals"].get("documents") or {}).get("text_bytes"),
        "has_documents": has_documents,
        "stored_facts": tuple(of for of in OF_PLACE if any(one.key.startswith(f"{DOCUMENTS}/train/{of}/") for one in objects)),
        "columns": columns_of(store, manifest, "train").kinds,
    }


def _of_content(store: Store, splits: dict[SplitName, FlatTokens]) -> JsonObject:
    stored = {split: sorted((store / split).listing()) for split in splits}
    meter.expect(bytes_to_check(store) + sum(size for mine in stored.values() for _, size in mine))
    for split in splits.values():
        for fault in check_split(split, SEEN):
            raise ValueError(f"{fault}. Nothing is made of a dataset that breaks the format.")
    with ThreadPoolExecutor(READERS) as readers:
        digests = {s: readers.map(partial((store / s).digest, seen=SEEN), dict(mine)) for s, mine in stored.items()}
    source = _as_source(_name_of(store), {split: list(found) for split, found in digests.items()})
    digest = digest_of([file["sha256"] for file in source["files"]])
    return {"name": source["name"], "digest": digest, "sources": (source,)}


def _name_of(store: Store) -> str:
    """A name for a dataset without a recorded name: that of its directory."""
    return as_name(store.root.rpartition("/")[2], "dataset")


def _as_source(name: str, stored: dict[SplitName, list[StoredObject]]) -> JsonObject:
    """A dataset without record of its documents, as a source: each split a file, each sequence a row."""
    files = [
        {"name": split, "size": sum(one.size for one in mine), "sha256": digest_of(*map(list, sorted(mine))), "split": split}
        for split, mine in stored.items()
    ]
    return {"name": name, "from": FOREIGN, "revision": None, "files": files}


def token_arrays_in(inputs: Sequence[Input]) -> tuple[str, ...]:
    """The token arrays that one of the inputs has."""
    return tuple(name for name in TOKEN_ARRAYS if any(name in one.token_arrays for one in inputs))


def splits_in(inputs: Sequence[Input]) -> tuple[SplitName, ...]:
    """The splits of a dataset that is made of *inputs*: those of all of them."""
    return splits_of({split: True for one in inputs for split in one.seq_counts})


def token_bytes_of(tokenizer: JsonObject, inputs: Sequence[Input]) -> TokenBytes | None:
    """The bytes of the ids of a derived dataset's tokenizer, from the first input that has them. None if none has."""
    for one in inputs:
        if one.tokenizer and one.tokenizer["digest"] == tokenizer.get("digest"):
            store = Store.at(one.location)
            with contextlib.suppress(FileNotFoundError):
                return read_token_bytes(store, manifest_of(store))
    return None


def settings_of_sources(inputs: Sequence[Input]) -> JsonObject:
    """The places of the inputs' sources when they were built, for tools that show a text, and their tokenizer if it is
    recorded.
    """
    runs = [run_of(open_corpus(one.location)) if one.has_documents else None for one in inputs]
    paths: list[str | None] = []
    for one, run in zip(inputs, runs, strict=True):
        found = run.source_paths if run else ()
        paths += [found[i] if i < len(found) else None for i in range(len(one.sources))]
    tokenizer = {"name": runs[0].tokenizer, "pattern": runs[0].pattern} if runs[0] else {}
    return {"sources": [{"path": path} for path in paths], "tokenizer": tokenizer}


PART_TOKENS = 1 << 25
"""Tokens of a part, unless one document has more: a shuffle holds a part in memory for each worker."""
PART_DOCUMENTS = 1 << 20
HEXADECIMAL = re.compile(rb"(0x)?[0-9a-fA-F]{16}")


def cut_inputs(inputs: Sequence[Input], wanted: Sequence[str] | None) -> list[InputPart]:
    """The parts of all inputs, in order, split by split. *wanted*: names of the sources that a filter lets through."""
    parts: list[InputPart] = []
    for split in ALL_SPLITS:
        file, source, before = 0, 0, len(parts)
        for index, one in enumerate(inputs):
            stops = np.cumsum([len(source["files"]) for source in one.sources]).tolist()
            through = None if wanted is None else tuple(i for i, source in enumerate(one.sources) if source["name"] in wanted)
            is_there = split in one.seq_counts
            ranges = sequence_ranges(open_split(Store.at(one.location) / split), PART_TOKENS) if is_there else ()
            for start, stop in ((start, end) for begin, end in ranges for start in range(begin, end, PART_DOCUMENTS)):
                parts.append(
                    InputPart(
                        location=one.location,
                        foreign=one.manifest_sha256 is None,
                        split=split,
                        number=len(parts) - before,
                        start=start,
                        stop=min(start + PART_DOCUMENTS, stop),
                        file=file,
                        source=source,
                        source_stops=tuple(stops),
                        wanted=through,
                        made_keys=None if one.has_documents else f"keys-{index}-{split}-{start}",
                    )
                )
            file += stops[-1]
            source += len(stops)
    return parts


def make_keys(part: InputPart, target: Target) -> InputPart:
    """Make the keys of a part from its documents' tokens, if its input has none. Return the part."""

    def counted() -> Iterator[TokenBatch]:
        for batch in bounded_batches(open_input(part), part.start, part.stop):
            yield batch
            meter.add("count", batch.encoded_tokens.nbytes)

    if part.made_keys is not None:
        target.workspace.write(part.made_keys, concatenated(token_keys(counted())))
    return part


def read_keys(path_or_url: str) -> UInt64s:
    """Sorted keys from a file, each once: uint64 in an ``.npy``, or 16 hexadecimal digits a line. ValueError, naming the line,
    otherwise.
    """
    store, name = file_at(path_or_url)
    data = store.read(name)
    if data.startswith(b"\x93NUMPY"):
        keys = np.load(io.BytesIO(data), allow_pickle=False)
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ValueError(f"{path_or_url}: holds {keys.dtype} of shape {keys.shape}, but keys are uint64 in one dimension")
        return np.unique(keys)
    lines = data.split()
    for number, line in enumerate(lines, 1):
        if not HEXADECIMAL.fullmatch(line):
            raise ValueError(
                f"{path_or_url}: item {number} is {line[:40].decode(errors='replace')!r}, but a key is 16 hexadecimal digits, as "
                "flat-tokens trace shows it. For ids, use --ids."
            )
    together = b"".join(line[-16:] for line in lines)
    return np.unique(np.frombuffer(bytes.fromhex(together.decode()), ">u8").astype(np.uint64))


def listed_by(request: Subset | ForgetRequest) -> UInt64s | None:
    """Keys of the documents that a request lists by their keys or ids: uint64[n], sorted; None if it lists none."""
    if request.key_list is not None:
        return read_keys(request.key_list)
    return None if request.id_list is None else np.unique(keys_of_bytes(_ids_in(request.id_list)))


def ids_with(keys: UInt64s, path_or_url: str) -> list[str]:
    """The ids in a text file that have one of the *keys*."""
    ids = _ids_in(path_or_url)
    return [ids[i].decode(errors="replace") for i in np.flatnonzero(np.isin(keys_of_bytes(ids), keys)).tolist()]


def _ids_in(path_or_url: str) -> list[bytes]:
    """The ids in a text file, one a line. Empty lines are skipped."""
    store, name = file_at(path_or_url)
    return [line for line in (line.removesuffix(b"\r") for line in store.read(name).split(b"\n")) if line]
