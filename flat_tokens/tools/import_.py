"""``flat-tokens import``: a dataset from files of a neighbour's format, on one machine."""

from __future__ import annotations

import argparse
import posixpath
import time
from collections.abc import Iterator

from flat_tokens.annotations import JsonFacts
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.batch import TokenBatch
from flat_tokens.formats import FORMATS, STREAMS, Files, Readable
from flat_tokens.manifest import EVERY_SPLIT
from flat_tokens.options import one_of
from flat_tokens.reader import Dataset, ahead, open
from flat_tokens.stores.store import PathOrUrl, Store
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.arguments import WRITING_ONLY, add_option_flags, given_options
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.writer import write_dataset

SUMMARY = "make a dataset of files in another format"
EXAMPLES = f"""\
{arguments.format_list()}

examples:
  flat-tokens import corpus/train.pbin out/web
  flat-tokens import fineweb/ out/web --format build-nanogpt --end-of-text 50256

A token that closes documents is removed where --end-of-text names it. python -m flows import does the same on several
machines, gives every document a key, and publishes a version.
"""


def import_dataset(
    path_or_url: PathOrUrl,
    out: PathOrUrl,
    format: str | None = None,
    options: JsonFacts | None = None,
    *,
    layout: LayoutName = "mmap",
) -> Dataset:
    """Write the dataset at a path, of any format, as a flat-tokens dataset.

    FileExistsError if something is at *out* already; ValueError, naming the file, if a file is damaged, and for an option or a
    layout that there is not.
    """
    one_of("layout", layout, LAYOUTS)
    corpus = open_corpus(path_or_url, format, options, by_origin=False)  # what the caller says alone decides what is stored
    store = Store.at(out)
    if store.exists("") and not any(store.exists(key) for key in ("zarr.json", ".zgroup")):
        raise FileExistsError(
            f"{store.url}: exists, and is not a dataset. If an import was stopped there, remove it and try again."
        )
    files = Files.at(path_or_url)
    provenance = {
        "name": posixpath.basename(files.url.rstrip("/")),
        "imported": {
            "format": corpus.format,
            "options": dict(options or {}),
            "files": [{"name": key, "size": files.store.size(key)} for key in files.keys],
        },
    }
    named = {name: corpus.splits.get(name) for name in EVERY_SPLIT}
    if all(split is None for split in named.values()):  # an array by itself
        named["train"] = corpus.split(None)[1]
    test = None if named["test"] is None else _batches(named["test"])
    write_dataset(out, _batches(named["train"]), _batches(named["validation"]), test=test, layout=layout, provenance=provenance)
    return open(out)


def lost_bounds(format: str, options: JsonFacts) -> str | None:
    """A warning if an import with these options cannot tell documents apart."""
    if format not in STREAMS or options.get("end_of_text") is not None:
        return None
    return (
        f"each split is one long sequence: {format} keeps documents apart by an end-of-text token alone. "
        "Name it: --end-of-text 50256 for gpt2, 128000 for Llama 3"
    )


def _batches(split: Readable | None) -> Iterator[TokenBatch]:
    return iter(()) if split is None else ahead(split.batches())


ARGUMENTS = f"""
PATH  a file, a directory, or the prefix that several files share; or a URL
OUT  where the dataset is written; there must be nothing yet
--format FORMAT  where the content does not tell it
--layout {{{",".join(LAYOUTS)}}}  how the dataset is stored (default: mmap)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_listed(parser, ARGUMENTS, format=FORMATS)
    add_option_flags(parser, except_for=WRITING_ONLY)


def run(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    dataset = import_dataset(options.path, options.out, options.format, given_options(options), layout=options.layout)
    splits = dataset.splits
    if hint := lost_bounds(dataset.manifest["provenance"]["imported"]["format"], given_options(options)):
        arguments.warn(hint)
    counts = {name: {"token_count": split.token_count, "seq_count": split.seq_count} for name, split in splits.items()}
    seconds = time.monotonic() - begun
    lines = [f"imported to {dataset.path}, {seconds:.1f} s"]
    for name, split in splits.items():
        sequences = terminal.plural(split.seq_count, "sequence")
        lines.append(f"  {name:10}  {terminal.plural(split.token_count, 'token')} in {sequences}")
    terminal.show(options, {"path": dataset.path, "splits": counts, "seconds": round(seconds, 3)}, lines)
    return arguments.SAME
