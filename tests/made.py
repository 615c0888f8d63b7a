"""Small datasets of known documents, as builds publish them, and what is read back of any dataset."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flat_tokens
from flat_tokens import FlatTokens, TokenBatch
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, LayoutName
from flat_tokens.arrays.opening import open_array
from flat_tokens.manifest import manifest_bytes
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter, commit
from tasks.output.pointer import publish
from tasks.parts.stored import document_spec

GPT2 = {"name": "gpt2", "digest": "97" * 32, "highest_id": 50256, "revision": None}


class Doc(NamedTuple):
    """A document: its tokens, and what is stored beside them."""

    ids: tuple[int, ...]
    key: int
    file: int
    row: int

    @property
    def text(self) -> str:
        """What its byte tokens spell."""
        return bytes(value - 1 for value in self.ids).decode()


Docs = Sequence[Doc]
Sequences = Iterable[Any]


def docs_of(*sequences: Sequence[int], file: int = 0, key: int = 1000) -> list[Doc]:
    """Documents of one file, one a row, with keys that differ."""
    return [Doc(tuple(ids), key + row, file, row) for row, ids in enumerate(sequences)]


def publish_docs(
    root: Path,
    train: Docs,
    validation: Docs = (),
    *,
    sources: Sequence[tuple[str, int]] = (("web", 1),),
    tokenizer: dict[str, Any] | None = GPT2,
    layout: LayoutName = "mmap",
    name: str = "made",
) -> str:
    """Publish documents below *root*; the version. *sources*: name and number of files of each."""
    made_of = {
        "name": name,
        "sources": [
            {
                "name": source,
                "from": "local files",
                "revision": None,
                "files": [{"name": f"{source}-{i}.jsonl", "size": 1, "sha256": f"{i:064x}", "split": None} for i in range(count)],
            }
            for source, count in sources
        ],
        "tokenizer": tokenizer or {},
        "documents": {"on_bad": "error"},
        "split": {"validation_fraction": 0.5, "seed": 0},
        "semantics": "1",
    }
    content = json.dumps([made_of, [list(train), list(validation)], layout])
    version = hashlib.sha256(content.encode()).hexdigest()[:16]
    store, chosen = Store.at(root) / "versions" / version, LAYOUTS[layout]
    objects, totals = [], {}
    for split, docs in (("train", train), ("validation", validation)):
        with FlatTokensWriter(store / split, chosen) as writer:
            writer.append(TokenBatch.from_sequences([doc.ids for doc in docs]))
        objects += [stored._replace(key=f"{split}/{stored.key}") for stored in writer.objects]
        totals[split] = {
            "token_count": writer.token_count,
            "seq_count": writer.seq_count,
            "max_token_id": writer.max_token_id,
        }
        for column in ("key", "file", "row"):
            with ArrayWriter(store, f"documents/{split}/{column}", document_spec(chosen)) as column_writer:
                column_writer.append(np.array([getattr(doc, column) for doc in docs], np.uint64))
            objects += column_writer.objects
    totals["documents"] = {"read": len(train) + len(validation), "text_bytes": 10}
    store.put("manifest.json", manifest_bytes(objects, totals, layout, made_of))
    commit(store, chosen)
    pointer = json.loads((root / "latest.json").read_text())["sequence"] if (root / "latest.json").exists() else 0
    publish(Store.at(root), version, pointer)
    return version


def write_sequences(path: Any, train: Sequences, validation: Sequences = (), **settings: Any) -> Any:
    """Write a dataset of these sequences of ids. Returns *path*."""
    flat_tokens.write_dataset(path, *([TokenBatch.from_sequences(part)] for part in (train, validation)), **settings)
    return path


_numbers = itertools.count()


def in_memory(train: Sequences, validation: Sequences = ()) -> str:
    """The URL of a new dataset of these sequences of ids, in memory."""
    return str(write_sequences(f"memory://made-{next(_numbers)}", train, validation))


def split_of(sequences: Sequences, **settings: Any) -> FlatTokens:
    """The split of a new dataset of these sequences of ids, in memory."""
    return flat_tokens.open(write_sequences(f"memory://made-{next(_numbers)}", sequences, **settings)).train


def masked_split(documents: Sequence[Sequence[tuple[int, bool]]], layout: Any = "mmap", masked: bool = True) -> FlatTokens:
    """Documents in memory, token ids each with whether it counts, with or without their mask."""
    batch = TokenBatch.from_sequences([[token for token, _ in document] for document in documents])
    mask = np.array([counts for document in documents for _, counts in document], np.uint8)
    url = f"memory://masked/{next(_numbers)}"
    flat_tokens.write_dataset(url, [batch._replace(loss_mask=mask if masked else None)], layout=layout)
    return flat_tokens.open(url).train


def foreign(path: Path, train: Sequences, validation: Sequences = ()) -> Path:
    """A dataset without manifest and without record of documents, as other writers leave one."""
    write_sequences(path, train, validation)
    (path / "manifest.json").unlink()
    return path


def read_docs(path: Path | str) -> dict[str, list[Doc]]:
    """Every document of a dataset, when ``verify`` has found nothing wrong with it."""
    flat_tokens.verify(path, "full")
    dataset = flat_tokens.open(path)
    found = {}
    for name in ("train", "validation"):
        split = getattr(dataset, name)
        columns = []
        for column in ("key", "file", "row"):
            array = open_array(dataset.store / f"documents/{name}/{column}", "uint64")
            columns.append(array.read(0, array.length).tolist())
        ids = [tuple(split.sequence(i).tolist()) for i in range(split.seq_count)]
        found[name] = [Doc(*facts) for facts in zip(ids, *columns, strict=True)]
    return found


def sequences(split: Any) -> list[list[int]]:
    """The ids of each sequence."""
    return [split.sequence(i).tolist() for i in range(split.seq_count)]


def small(name: LayoutName, tokens: int, starts: int, *, in_blocks: bool = False) -> Layout:
    """A layout whose objects hold *tokens* tokens and *starts* entries. *in_blocks*: compressed chunks have blocks, as those of
    the real layouts, which say how long they are.
    """
    spec = LAYOUTS[name]
    if spec.zarr_format == 2:
        lengths = ((tokens, tokens), (starts, starts))
    else:
        lengths = ((tokens, max(tokens // 2, 1)), (starts, max(starts // 2, 1)))
    chunk, level = lengths[0][1], spec.encoded_tokens.zstd_level
    block = chunk // (2 - chunk % 2) if in_blocks and level is not None else None
    return Layout(
        name,
        ArraySpec("uint32", "token", spec.zarr_format, *lengths[0], level, block),
        ArraySpec("uint64", "sequence", spec.zarr_format, *lengths[1], 3),
    )


def write_ragged(path: Path, shortest: int, longest: int, count: int) -> Any:
    """Write a dataset of random sequences, each from *shortest* to below *longest* tokens."""
    rng = np.random.default_rng(0)
    return write_sequences(path, [rng.integers(0, 2**31, rng.integers(shortest, longest)).tolist() for _ in range(count)])
