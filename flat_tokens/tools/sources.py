"""The documents that sequences were made of: finding their source files again, and reading single rows of them.

A build records a file's name below its source, its size and its digest, never where it lay. The user, the source's URL, or
the record of a run says where it may be now; the document's key says whether a row is the document.
"""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import open_array
from flat_tokens.stores.store import Store
from flat_tokens.text.compression import compression_of, unpacked
from flat_tokens.text.formats import FORMATS, HEAD_BYTES, FileFormat, detect_format, holding
from flat_tokens.text.rows import TextFile, as_unicode, ids_as_text, keys_of, to_large
from flat_tokens.tools.corpus import Corpus, Source, SourceFile, run_of


class Row(NamedTuple):
    """A row of a source file: its text, and the key that a build gives to it."""

    text: str
    key: int


class Place(NamedTuple):
    """Where a sequence's document is from: its key, its file (None where the manifest names none) and its row, from 0."""

    key: int
    file: SourceFile | None
    row: int

    def described(self, sources: Sequence[Source]) -> dict[str, Any]:
        """The place for JSON, the key in hexadecimal: JSON's numbers end at 2**53."""
        file = self.file
        return {
            "key": f"{self.key:016x}",
            "source": sources[file.source].name if file else None,
            "file": file.name if file else None,
            "row": self.row,
        }


def places_of(corpus: Corpus, split: str, sequences: Iterable[int]) -> list[Place] | None:
    """Where sequences of a split come from; None where there is no record of that."""
    if corpus.receipt:
        return _places_of_shard(corpus, sequences)
    documents = corpus.documents(split)
    if documents is None:
        return None
    files = [file for source in corpus.sources for file in source.files]
    indices = np.array(list(sequences), np.int64)
    facts = zip(*(array.take(indices).tolist() for array in documents), strict=True)
    return [Place(key, files[number] if number < len(files) else None, row) for key, number, row in facts]


def _places_of_shard(corpus: Corpus, sequences: Iterable[int]) -> list[Place]:
    """A token shard has keys and rows; its file it knows by the digest alone, and rows count from where its part begins."""
    indices = np.array(list(sequences), np.int64)
    key, row = (open_array(corpus.store / "documents" / name, "uint64").take(indices).tolist() for name in ("key", "row"))
    return [Place(a, None, b) for a, b in zip(key, row, strict=True)]


def nameless(corpus: Corpus) -> str:
    """Why a place has no file."""
    if not corpus.receipt:
        return "the manifest names no file with this number"
    inputs = corpus.receipt["inputs"]
    digest = next(iter(inputs.get("file") or ["unknown"]))
    return (
        f"a token shard's rows count from the beginning of its part, {inputs.get('range')} of the file with sha256 {digest[:12]}"
    )


class Locator:
    """Finds source files. *given*: directories, or files, where the user says that they are."""

    def __init__(self, corpus: Corpus, given: Sequence[str] = ()) -> None:
        self._sources, self._given, self._run = corpus.sources, given, run_of(corpus)
        self._found: dict[int, str | None] = {}

    def find(self, file: SourceFile) -> str | None:
        """A path or URL where the file is, of the size that the manifest says; None where there is none."""
        if file.number not in self._found:
            self._found[file.number] = next((place for place in self._candidates(file) if _is_there(place, file)), None)
        return self._found[file.number]

    def _candidates(self, file: SourceFile) -> Iterator[str]:
        for place in self._given:
            yield from (posixpath.join(place, file.name), posixpath.join(place, posixpath.basename(file.name)))
            if posixpath.basename(place) == posixpath.basename(file.name):
                yield place
        if file.source < len(self._run.source_paths) and (path := self._run.source_paths[file.source]):
            yield posixpath.join(_base(path), file.name)
        if self._run.files is not None:
            yield from (posixpath.join(self._run.files, name) for name in (file.sha256, f"{file.sha256}.raw"))
        source = self._sources[file.source]
        if source.origin.startswith("hf://datasets/") and source.revision:
            repository = source.origin.removeprefix("hf://datasets/").partition(" ")[0]
            yield f"hf://datasets/{repository}@{source.revision}/{file.name}"
        elif "://" in source.origin:
            yield posixpath.join(_base(source.origin), file.name)


def _base(path: str) -> str:
    """The directory that a source's file names are relative to: of a glob or a file, the one that holds it."""
    path = os.path.expanduser(path.removeprefix("file://").removeprefix("local://"))
    remote = "://" in path
    if not remote and os.path.isdir(path):
        return path
    before = re.split(r"[*\[]" if path.startswith("http") else r"[*?\[]", path, maxsplit=1)[0]
    if before == path and remote and not PurePosixPath(path).suffix:
        return path
    return before.rpartition("/")[0]


def _is_there(place: str, file: SourceFile) -> bool:
    try:
        store = Store.at(posixpath.dirname(place) or ".")
        key = posixpath.basename(place)
        # Of a packed file, the manifest has the size of what is in it.
        return store.size(key) == file.size or compression_of(store.read_range(key, 0, HEAD_BYTES)) is not None
    except Exception:  # noqa: BLE001  # whatever a store's driver raises where nothing is to be had: it is not reachable
        return False


def read_rows(place: str, file: SourceFile, source: Source, rows: Iterable[int]) -> dict[int, Row]:
    """Rows of a source file, counted from 0, read by the readers of builds. Rows that the file doesn't have, or that are no
    text, are left out.

    ValueError where the file is not of its format; ModuleNotFoundError where a package is needed that is not installed.
    """
    wanted, settings, kind = np.unique(np.fromiter(rows, np.int64)), source.settings, "a source file"
    if not len(wanted):
        return {}
    with ExitStack() as stack:
        try:
            path, size = _unpacked(place, file.name, stack)
            identity = settings.get("id_column")
            text = TextFile(
                path,
                file.name,
                size,
                str(settings.get("text_column", "text")),
                None if identity is None else str(identity),
                str(settings.get("document_separator") or "").encode(),
            )
            with text.open() as opened:
                kind = detect_format(opened.read(HEAD_BYTES), file.name, settings.get("format", "auto"))
            return dict(_rows(kind, text, wanted))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of whatever library reads the format
            raise ValueError(f"{place}: cannot be read as {kind}: {error}") from error


def _unpacked(place: str, name: str, stack: ExitStack) -> tuple[str, int]:
    """Path or URL, and size, of the unpacked file: the file itself, or a temporary one that goes with *stack*."""
    with fsspec.open(place, "rb") as stored:
        ending = compression_of(stored.read(HEAD_BYTES))
        if ending is None:
            return place, stored.seek(0, os.SEEK_END)
        stored.seek(0)
        temporary = stack.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115  the stack closes it
        for block in unpacked(stored, ending, name):
            temporary.write(block)
        temporary.flush()
        return temporary.name, temporary.tell()


def _rows(kind: FileFormat, file: TextFile, wanted: npt.NDArray[np.int64]) -> Iterator[tuple[int, Row]]:
    """Those of the *wanted* rows that are documents. What builds replace in texts is replaced here too."""
    for part, first in holding(kind, file, wanted.tolist()):
        for batch in FORMATS[kind].read(file, part):
            chosen = np.isin(batch.rows + first, wanted)
            for values in (batch.texts, batch.ids):
                if values is not None:
                    chosen &= ~np.asarray(values.is_null())
            if chosen.any():
                texts, _ = as_unicode(to_large(batch.texts).filter(chosen))
                keys = keys_of(texts, None if batch.ids is None else ids_as_text(batch.ids).filter(chosen))
                found = zip(batch.rows[chosen] + first, texts.to_pylist(), keys, strict=True)
                yield from ((int(row), Row(text, int(key))) for row, text, key in found)
            if first + batch.end > wanted[-1]:
                return


def digest_is(place: str, sha256: str) -> bool:
    """Whether a file has the content with this digest; a build's own copies are named after it."""
    name = posixpath.basename(place)
    return name.partition(".")[0] == sha256 or Store.at(posixpath.dirname(place) or ".").digest(name).sha256 == sha256
