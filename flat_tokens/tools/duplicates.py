"""``flat-tokens duplicates``: the documents that a build left out because an earlier one has the same text, or nearly; and those
that it kept, with their clusters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.manifest import DUPLICATE, DUPLICATES, NEAR_DUPLICATE, NEAR_DUPLICATES
from flat_tokens.stores.store import stored_object
from flat_tokens.tools import arguments
from flat_tokens.tools.corpus import Corpus, open_corpus
from flat_tokens.tools.sources import Place

SUMMARY = "list duplicates and near-duplicates, each with the document that stayed"
EXAMPLES = """\
examples:
  flat-tokens duplicates out/web                 key, source, file and row of each, and of the one that stayed
  flat-tokens duplicates out/web --json          a line of JSON for each
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a dataset, or a build's output")


def run(options: argparse.Namespace) -> int:
    for copy, stayed in duplicates_of(open_corpus(options.path)):
        if options.json:
            print(json.dumps({**copy, "of": stayed}))
        else:
            place, of = (f"{one['source']} {one['file']} row {one['row']:,}" for one in (copy, stayed))
            similarity = f", {copy['similarity']:.2f} of it the same" if "similarity" in copy else ""
            print(f"{copy['key']}  {place}, as {of}{similarity}")
    return arguments.SAME


def duplicates_of(corpus: Corpus) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """Each document that has the text of another, or nearly, and the place of that one, for JSON: the duplicates in the order of
    the sources, then the near-duplicates, with their ``similarity``. ValueError where a list is damaged, or there is none.
    """
    policy = corpus.provenance.get("documents") or {}
    if policy.get("duplicates") != "drop" and not policy.get("near_duplicates"):
        raise ValueError(
            f"{corpus.url}: has no list of duplicates, as it was not built with documents.duplicates: drop or near_duplicates"
        )
    for place, of, similarity in copies_of(corpus):
        copy, stayed = (one.described(corpus.sources) for one in (place, of))
        copy |= {} if similarity is None else {"similarity": similarity}
        yield copy, {name: stayed[name] for name in ("source", "file", "row")}


class Copy(NamedTuple):
    """A document and the one that it is a copy of; of near-duplicates the similarity of both."""

    place: Place
    of: Place
    similarity: float | None


def copies_of(corpus: Corpus) -> Iterator[Copy]:
    """The duplicates of a dataset in the order of the sources, then its near-duplicates. ValueError where a list is damaged."""
    files = [file for source in corpus.sources for file in source.files]
    for kind, dtype in ((DUPLICATES, DUPLICATE), (NEAR_DUPLICATES, NEAR_DUPLICATE)):
        for _, entries in lists_of(corpus, kind, dtype):
            for _, document, file, row, of_file, of_row, *near in entries.tolist():
                if (file, row) != (of_file, of_row):  # the first of a cluster that is kept
                    similarity = near[1] / 1e6 if near else None
                    yield Copy(
                        Place(document, files[file], row), Place(near[0] if near else 0, files[of_file], of_row), similarity
                    )


def lists_of(corpus: Corpus, kind: str, dtype: np.dtype[Any]) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
    """The lists below *kind* of a dataset, in their order, with their names: DUPLICATE[n] or NEAR_DUPLICATE[n]. ValueError where
    one is damaged.
    """
    count = sum(len(source.files) for source in corpus.sources)
    listed = {stored["key"]: stored_object(stored) for stored in corpus.manifest.get("objects", ())}
    for key in sorted(key for key in listed if key.startswith(f"{kind}/")):
        data = corpus.store.read(key)
        if not listed[key].is_of(data) or len(data) % dtype.itemsize:
            raise ValueError(f"{corpus.store.path(key)}: is not the list of duplicates that was published")
        entries = np.frombuffer(data, dtype)
        if (most := int(max(entries["file"].max(initial=0), entries["of_file"].max(initial=0)))) >= count:
            raise ValueError(f"{corpus.store.path(key)}: names file {most}, but there are {count}")
        yield key, entries
