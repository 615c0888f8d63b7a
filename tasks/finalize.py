"""From written objects to a published version: its identity, metadata, manifest, card, check, commit and pointer."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays import LAYOUTS, Layout, LayoutName, group_metadata, put_metadata
from flat_tokens.manifest import bytes_to_check, check_objects, check_split, manifest_bytes
from flat_tokens.reader import MANIFEST, SPLITS, open_split
from flat_tokens.storage import Store, StoredObject
from flat_tokens.stored_array import StoredArray
from flat_tokens.writer import commit
from tasks.caching import Place
from tasks.models import FORMAT_SEMANTICS, BuildConfig, Model, SourceFile, TokenShard, digest_of
from tasks.progress import meter
from tasks.shards import document_spec
from tasks.sources import PinnedSource
from tasks.split import DOCUMENT_ARRAYS, Extent, ShardPlace, Span, Written
from tasks.tokenizers import Tokenizer

CARD = "README.md"
KEYS_AT_ONCE = 1 << 25


class Provenance(Model):
    """What a version was made of: everything that its bytes depend on, and nothing of when, where or by whom."""

    name: str
    sources: tuple[dict[str, Any], ...]
    tokenizer: dict[str, Any]
    documents: dict[str, Any]
    split: dict[str, Any]
    semantics: str = FORMAT_SEMANTICS


def provenance(
    config: BuildConfig, pinned: tuple[PinnedSource, ...], files: list[SourceFile], tokenizer: Tokenizer
) -> Provenance:
    sources = []
    for i, (source, pin) in enumerate(zip(config.sources, pinned, strict=True)):
        sources.append(
            {
                **source.model_dump(exclude={"path", "hub"}, exclude_none=True),
                "from": pin.origin,
                "revision": pin.revision,
                "files": [file.model_dump(include={"name", "size", "sha256", "split"}) for file in files if file.source == i],
            }
        )
    return Provenance(
        name=config.name,
        sources=tuple(sources),
        tokenizer={
            # A file's name, not where it lies on this machine; a hub repository's name is whole, and has a revision.
            "name": tokenizer.name if tokenizer.revision else PurePath(tokenizer.name).name,
            "digest": tokenizer.digest,
            "highest_id": tokenizer.highest_id,
            "revision": tokenizer.revision,
            # It changes nothing, unless documents that it does not take are left out: then it may decide which.
            **({"engine": "reference"} if without_fast_engine(config, tokenizer) else {}),
        },
        documents=config.documents.model_dump(),
        split={"validation_fraction": config.fraction, "seed": config.split_seed},
    )


def without_fast_engine(config: BuildConfig, tokenizer: Tokenizer) -> bool:
    """Whether the fast engine is forbidden where that may decide which documents are left out."""
    return config.tokenizer.engine == "reference" and tokenizer.make_fast is not None and config.documents.on_bad != "error"


def build_id(made_of: Provenance, layout: LayoutName) -> str:
    """The version's name: a digest of all that its bytes depend on."""
    return digest_of(made_of.model_dump(), layout)[:16]


def is_published(root: Store, version: str, layout: LayoutName) -> bool:
    """Whether the version is there: its root group's metadata is written when all else is."""
    marker = list(group_metadata(LAYOUTS[layout].zarr_format, {}))[-1]
    return root.exists(f"versions/{version}/{marker}")


def write_version(
    made_of: Provenance,
    layout: LayoutName,
    spans: list[Span],
    written: list[Written],
    places: list[ShardPlace],
    place: Place,
    version: str,
    verify_level: str,
) -> dict[str, Any]:
    """Everything of a version but the tokens, then the check, then the commit. The manifest, as it was written."""
    store = place.root / "versions" / version
    totals: dict[str, Any] = split_totals(spans, written)
    repeated = repeated_keys(store, layout, totals, Path(place.staging))
    totals["documents"] = {**document_totals(places, repeated), "by_source": source_totals(made_of, places)}
    described = card(made_of, layout, totals, version)
    return seal(store, layout, made_of.model_dump(), totals, written, described, verify_level)


def split_totals(extents: Sequence[Extent], written: Sequence[Written]) -> dict[str, Any]:
    """What each split holds, by what was written of it."""
    totals: dict[str, Any] = {}
    for split in SPLITS:
        mine = [(at, part) for at, part in zip(extents, written, strict=True) if at.split == split]
        totals[split] = {
            "token_count": max((at.stop for at, _ in mine if at.of_tokens), default=0),
            "seq_count": max(at.stop for at, _ in mine if not at.of_tokens),
            "max_token_id": max(part.max_token_id for _, part in mine),
        }
    return totals


def seal(
    store: Store,
    layout: LayoutName,
    made_of: dict[str, Any],
    totals: dict[str, Any],
    written: Sequence[Written],
    described: str,
    verify_level: str,
) -> dict[str, Any]:
    """Make a version of written objects: metadata, card (*described*), manifest, check, commit. The manifest, as written."""
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
        **{f"documents/{split}/{name}": (document_spec(layout), totals["seq_count"]) for name in DOCUMENT_ARRAYS},
    }
    stored = [o for name, (spec, length) in arrays.items() for o in put_metadata(store, name, spec.metadata(length))]
    attributes = {"max_token_id": totals["max_token_id"]}
    return [*stored, *put_metadata(store, split, group_metadata(layout.zarr_format, attributes))]


def document_totals(places: list[ShardPlace], repeated: int) -> dict[str, Any]:
    shards = [at.shard for at in places]
    skipped: Counter[str] = Counter()
    replaced: Counter[str] = Counter()
    for shard in shards:
        skipped.update(shard.skipped)
        replaced.update(shard.replaced)
    read, written = sum(shard.read for shard in shards), sum(shard.written for shard in shards)
    if read != written + skipped.total():
        raise AssertionError(f"documents read {read}, written {written}, skipped {skipped}")
    return {
        "read": read,
        "written": written,
        "skipped": dict(sorted(skipped.items())),
        "replaced": dict(sorted(replaced.items())),
        "repeated_keys": repeated,
        "text_bytes": sum(shard.text_bytes for shard in shards),
    }


def source_totals(made_of: Provenance, places: list[ShardPlace]) -> list[dict[str, Any]]:
    """Documents, text and tokens of each source, in the order of the sources."""
    of_file = [i for i, source in enumerate(made_of.sources) for _ in source["files"]]
    shards: list[list[TokenShard]] = [[] for _ in made_of.sources]
    for at in places:
        shards[of_file[at.file]].append(at.shard)
    return [
        {
            "name": source["name"],
            **{name: sum(getattr(shard, name) for shard in mine) for name in ("read", "written", "text_bytes", "token_count")},
            "skipped": dict(sorted(sum((Counter(shard.skipped) for shard in mine), Counter[str]()).items())),
        }
        for source, mine in zip(made_of.sources, shards, strict=True)
    ]


def repeated_keys(store: Store, layout: LayoutName, totals: dict[str, Any], staging: Path) -> int:
    """Documents whose key an earlier document has: equal ids, or, without ids, equal texts. The keys are read as they were
    written for the version, whose objects are larger and fewer than those of its shards.
    """
    spec = document_spec(LAYOUTS[layout])
    columns = [StoredArray(store / f"documents/{split}/key", spec, totals[split]["seq_count"]) for split in SPLITS]

    keys = (
        column.read(start, min(start + spec.object_length, column.length))
        for column in columns
        for start in range(0, column.length, spec.object_length)
    )
    return count_repeated(keys, sum(column.length for column in columns), staging)


def count_repeated(keys: Iterable[npt.NDArray[np.uint64]], count: int, staging: Path) -> int:
    """How many of *count* keys, each uint64, are those of earlier ones. Where they are too many for memory, they are divided
    into files in *staging* first: equal keys are in one of them.
    """
    parts = -(-count // KEYS_AT_ONCE)
    if parts <= 1:
        return _repeated(np.concatenate([*keys, np.empty(0, np.uint64)]))
    with tempfile.TemporaryDirectory(dir=staging, prefix="keys-") as directory, contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(Path(directory, str(part)), "w+b")) for part in range(parts)]
        for some in keys:
            part_of = some % np.uint64(parts)
            order = np.argsort(part_of, kind="stable")
            bounds = np.searchsorted(part_of[order], np.arange(parts + 1, dtype=np.uint64)).tolist()
            for file, (start, stop) in zip(files, pairwise(bounds), strict=True):
                file.write(some[order[start:stop]].tobytes())
        return sum(_repeated(_all_of(file)) for file in files)


def _repeated(keys: npt.NDArray[np.uint64]) -> int:
    return len(keys) - len(np.unique(keys))


def _all_of(file: BinaryIO) -> npt.NDArray[np.uint64]:
    file.seek(0)
    return np.frombuffer(file.read(), np.uint64)


def check_version(store: Store, objects: list[StoredObject], totals: dict[str, Any], level: str) -> None:
    """Check what is about to be published. ValueError names every fault, up to ten."""
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


def card(made_of: Provenance, layout: LayoutName, totals: dict[str, Any], version: str) -> str:
    """The dataset card."""
    documents = totals["documents"]
    lines = [
        *card_head(made_of.name, layout, totals, version),
        *card_tokenizer(made_of.tokenizer),
        "## Documents",
        "",
        f"{documents['read']:,} read, {documents['written']:,} written, "
        + (f"{documents['text_bytes']:,} bytes of text, " if "text_bytes" in documents else "")
        + f"{documents['repeated_keys']:,} with the key of another.",
        f"Skipped: {counts_text(documents['skipped'])}. Replaced: {counts_text(documents['replaced'])}.",
        *([f"Policy: {', '.join(f'{key} {value}' for key, value in made_of.documents.items())}."] if made_of.documents else []),
        _split_sentence(made_of.split),
        "",
        *card_sources(made_of.sources),
    ]
    return "\n".join(lines) + "\n"


def card_head(name: str, layout: LayoutName, totals: dict[str, Any], version: str) -> list[str]:
    """The lines of a card that say what it is and how it is read."""
    return [
        f"# {name}",
        "",
        f"A flat-tokens dataset, version `{version}`, layout `{layout}`.",
        "",
        "| split | tokens | sequences | largest token id |",
        "|---|---:|---:|---:|",
        *(f"| {s} | {totals[s]['token_count']:,} | {totals[s]['seq_count']:,} | {totals[s]['max_token_id']:,} |" for s in SPLITS),
        "",
        "## Read it",
        "",
        "```python",
        "import flat_tokens",
        "",
        'dataset = flat_tokens.open("path/to/this/directory")',
        "dataset.train.sequence(0)        # token ids of the first document: uint32[length]",
        "dataset.train.slice(0, 2048)     # stored tokens: id * 2 + 1 where a sequence starts, id * 2 elsewhere",
        "```",
        "",
        'Or with plain zarr: `zarr.open_group("path/to/this/directory", mode="r")["train/encoded_tokens"]`.',
        "Beside the two splits, `documents/` has each sequence's key, file (its number below, from 0) and row.",
        "",
    ]


def card_tokenizer(tokenizer: dict[str, Any]) -> list[str]:
    """The lines of a card that name the tokenizer, which tokens from elsewhere may have no record of."""
    if "name" not in tokenizer:
        return ["## Tokenizer", "", "Not recorded.", ""]
    return [
        "## Tokenizer",
        "",
        f"`{tokenizer['name']}`, ids 0 to {tokenizer['highest_id']:,}, digest `{tokenizer['digest']}`"
        + (f", revision `{tokenizer['revision']}`." if tokenizer["revision"] else "."),
        "",
    ]


def card_sources(sources: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a card that list the sources and their files, by the numbers that ``documents/`` has."""
    lines = ["## Sources"]
    number = 0
    for source in sources:
        lines += ["", f"### {source['name']}", "", f"From {source['from']}"]
        lines[-1] += f", revision `{source['revision']}`." if source["revision"] else "."
        lines += ["", "| | file | bytes | sha256 |", "|---:|---|---:|---|"]
        for file in source["files"]:
            name = file["name"].replace("|", "\\|")
            lines.append(f"| {number} | {name} | {file['size']:,} | `{file['sha256']}` |")
            number += 1
    return lines


def counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"


def _split_sentence(split: dict[str, Any]) -> str:
    if not split["validation_fraction"]:
        return "Validation: what the sources name as such."
    return f"Validation: a share of {split['validation_fraction']:g} of the documents, by their keys and seed {split['seed']}."
