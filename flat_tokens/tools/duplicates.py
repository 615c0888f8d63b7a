"""``flat-tokens duplicates``: the documents that a build left out because an earlier one has the same text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np

from flat_tokens.manifest import DUPLICATE, DUPLICATES
from flat_tokens.stores.store import stored_object
from flat_tokens.tools import arguments
from flat_tokens.tools.corpus import Corpus, open_corpus
from flat_tokens.tools.sources import Place

SUMMARY = "list the documents that were left out as duplicates, each with the one that stayed"
EXAMPLES = """\
examples:
  flat-tokens duplicates out/web                 key, source, file and row of each, and of the one that stayed
  flat-tokens duplicates out/web --json          a line of JSON for each
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a dataset, or a build's output")
    arguments.add_shared(parser, "--json")


def run(options: argparse.Namespace) -> int:
    for copy, stayed in duplicates_of(open_corpus(options.path)):
        if options.json:
            print(json.dumps({**copy, "of": stayed}))
        else:
            place, of = (f"{one['source']} {one['file']} row {one['row']:,}" for one in (copy, stayed))
            print(f"{copy['key']}  {place}, as {of}")
    return arguments.SAME


def duplicates_of(corpus: Corpus) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """Each document that was left out, and the place of the one that stayed, for JSON; in the order of the sources. ValueError
    where a list is damaged, or the dataset has no record of documents.
    """
    if (corpus.provenance.get("documents") or {}).get("duplicates") != "drop":
        raise ValueError(f"{corpus.url}: has no list of duplicates, as it was not built with documents.duplicates: drop")
    files = [file for source in corpus.sources for file in source.files]
    listed = {stored["key"]: stored_object(stored) for stored in corpus.manifest.get("objects", ())}
    for key in sorted(key for key in listed if key.startswith(f"{DUPLICATES}/")):
        data = corpus.store.read(key)
        if not listed[key].is_of(data) or len(data) % DUPLICATE.itemsize:
            raise ValueError(f"{corpus.store.path(key)}: is not the list of duplicates that was published")
        for _, document, file, row, of_file, of_row in np.frombuffer(data, DUPLICATE).tolist():
            if max(file, of_file) >= len(files):
                raise ValueError(f"{corpus.store.path(key)}: names file {max(file, of_file)}, but there are {len(files)}")
            copy = Place(document, files[file], row).described(corpus.sources)
            stayed = Place(0, files[of_file], of_row).described(corpus.sources)
            yield copy, {name: stayed[name] for name in ("source", "file", "row")}
