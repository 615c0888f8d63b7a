"""The neighbours' formats: written from flat-tokens arrays, and read back. One module a format.

>>> opened = open_any("corpus/train.pbin")
>>> opened.format, opened.splits["train"].seq_count

This is the list of formats, and the recognition of a path's format by its content. ``contract`` defines what each offers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from flat_tokens.arrays.opening import read_metadata
from flat_tokens.formats.contract import EXPORT_RECORD, ExportFile, Files, Format, JoinedReaders, Readable, Splits, split_of
from flat_tokens.formats.datatrove import DATATROVE
from flat_tokens.formats.litdata import LITDATA
from flat_tokens.formats.mds import MDS
from flat_tokens.formats.megatron import MEGATRON
from flat_tokens.formats.modalities import MODALITIES
from flat_tokens.formats.nanogpt import BUILD_NANOGPT, JAXFORMER, LLMC, LLMC_LLAMA, NANOGPT
from flat_tokens.formats.olmo import OLMO
from flat_tokens.formats.parquet import ARROW, PARQUET
from flat_tokens.manifest import CACHE, EVERY_SPLIT, SplitName
from flat_tokens.reader import open_root, open_split, open_splits, resolve
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, read_json

__all__ = [
    "FLAT_TOKENS",
    "FORMATS",
    "STREAMS",
    "ExportFile",
    "Files",
    "Readable",
    "Splits",
    "check_format",
    "open_any",
    "recognised",
    "source",
]

FLAT_TOKENS = "flat-tokens"

_STREAMS = (NANOGPT, BUILD_NANOGPT, JAXFORMER, LLMC, LLMC_LLAMA)
STREAMS = frozenset(entry.name for entry in _STREAMS)
"""Formats that separate documents only by an end-of-text token, which has to be named for an import."""
_LISTED: tuple[Format, ...] = (MODALITIES, MEGATRON, *_STREAMS, DATATROVE, OLMO, MDS, LITDATA, PARQUET, ARROW)
FORMATS = {entry.name: entry for entry in _LISTED}
"""Every format by its name, in the order in which they are listed for people."""


class FoundDataset(NamedTuple):
    """The dataset found at a path: the format's name, and its splits."""

    format: str
    splits: Mapping[SplitName, Readable]


def open_any(path_or_url: PathOrUrl, format: str | None = None, options: Any = None) -> FoundDataset:
    """Open a dataset of any format: a directory, a file, or the prefix that several files share.

    The format is recognised by its content; formats without a recognisable content have to be named. *options* are an
    instance of the format's own dataclass. ValueError if no format is recognised, or several; FileNotFoundError if there
    is nothing; TypeError for options of something else.
    """
    if format is not None:
        check_format(format, (FLAT_TOKENS, *FORMATS))
    if format in (None, FLAT_TOKENS) and (splits := _flat_tokens(Store.at(path_or_url), required=format is not None)):
        if options is not None:
            raise TypeError(f"options are {options!r}, but {FLAT_TOKENS} has none")
        return FoundDataset(FLAT_TOKENS, splits)
    files = Files.at(path_or_url)
    if (exported := _exported_nothing(files)) and format in (None, exported.format):
        return exported
    if format is None:
        format = _recognise(files)
    chosen = FORMATS[format]
    if options is not None and not isinstance(options, chosen.options):
        known = ", ".join(field.name for field in fields(chosen.options))
        raise TypeError(f"options are {options!r}, but those of {format} are {chosen.options.__qualname__}, with {known}")
    return FoundDataset(format, chosen.open(files, chosen.options() if options is None else options))


def _exported_nothing(files: Files) -> FoundDataset | None:
    """The empty splits of an export of no sequence, which has no files, or those alone that list the others."""
    if len(files.keys) > len(EVERY_SPLIT):
        return None
    try:
        record = read_json(files.store, EXPORT_RECORD)
        if record["parts"] != 0 or record["format"] not in FORMATS:
            return None
        return FoundDataset(record["format"], {name: JoinedReaders(()) for name in EVERY_SPLIT if name in record["splits"]})
    except (*NO_OBJECT, ValueError, KeyError, TypeError):
        return None


def check_format(format: object, known: Collection[str]) -> None:
    """ValueError for the name of a format that is not *known*."""
    if not isinstance(format, str) or format not in known:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(known)}")


def source(path_or_url: PathOrUrl) -> Splits:
    """The splits of a dataset, as an export takes them. FileNotFoundError if there is no dataset."""
    store, _ = open_root(Store.at(path_or_url))
    return open_splits(store)


def _flat_tokens(root: Store, *, required: bool) -> Mapping[SplitName, Readable]:
    """The splits of a dataset, or a flat-tokens array alone under the split's name; nothing if *root* is neither."""
    try:
        store = resolve(root)
        metadata = read_metadata(store, "group")
    except (FileNotFoundError, NotADirectoryError):
        if required:
            open_root(root)
        return {}
    if "max_token_id" in metadata["attributes"]:
        return {split_of(store.root.rsplit("/", 1)[-1]): open_split(store)}
    return open_splits(store)


def recognised(files: Files) -> list[str]:
    """The formats that files are in by their content."""
    return [name for name, entry in FORMATS.items() if entry.recognise(files)]


def _recognise(files: Files) -> str:
    if any(key.startswith(f"{CACHE}/") for key in files.keys):  # kept columns of its token shards are Parquet
        raise ValueError(f"{files.store.url}: is an output at which nothing is published. Run its build to the end.")
    found = recognised(files)
    if len(found) == 1:
        return found[0]
    names = ", ".join(found or FORMATS)
    raise ValueError(
        f"{files.url}: is in several formats ({names}). Name one of its files, or the format."
        if found
        else f"{files.url}: is in none of the formats that are known by their content. Name it, if it is one of {names}."
    )
