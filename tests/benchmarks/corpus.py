"""Text that does not repeat, without a download: the source and documentation files of what is installed.

Every file is a document, whole. Files of the same content are taken once, and files of the same name in the same folder of a
package once, though their content differ: two versions of a package repeat most of their text. The order is by a digest of the
name, so that the text is mixed and the same machine gives the same files again. *gather* may stop early: any prefix is a sample.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

FILES = 8
"""Files of a corpus of the wanted size: shares of it are so many files."""
ROW_GROUP_BYTES = 4_000_000
ENDING = re.compile(
    r"\.(c|cc|cfg|cmake|cpp|css|cu|cuh|el|h|hpp|html|inc|ini|java|js|lua|md|mjs|php|pl|pm|pod|proto|py|pyi|pyx|rb|rs|rst|scm|sh"
    r"|sql|tcl|td|tex|toml|ts|txt|vim|yaml|yml)$"
)
"""Of source and documentation. Data is none of it: .json, .csv and .xml repeat themselves."""
PACKED = re.compile(r"/(?:doc|man/man\d|info)/.*\.gz$")
"""Documentation that Linux distributions compress, in English: of other languages there are few pages, much alike."""
PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|python\d[\d.]*)/")
TEXT_BYTES = b"text_bytes"
"""Where the metadata of a file has how many bytes its texts have."""


class Corpus(NamedTuple):
    """Parquet files with the columns `text` and `id`, all below *directory*."""

    directory: Path

    @property
    def paths(self) -> list[Path]:
        return sorted(self.directory.iterdir())

    @property
    def documents(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self.paths)

    @property
    def text_bytes(self) -> int:
        return sum(int(pq.read_metadata(path).metadata[TEXT_BYTES]) for path in self.paths)

    def first(self, count: int, directory: Path) -> "Corpus":
        """The first *count* files in a directory of their own, as links."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for path in self.paths[:count]:
            os.link(path, directory / path.name)
        return Corpus(directory)


def installed() -> list[Path]:
    """Where text may lie on a Linux machine: this interpreter's packages, its library, and what the system installed."""
    python = [Path(sysconfig.get_path("purelib")), Path(sys.base_prefix) / "lib"]
    return [*python, *map(Path, ("/usr/lib/python3", "/usr/share", "/usr/include", "/usr/lib", "/usr/local", "/usr/src"))]


def name_of(path: str) -> str:
    """A file's name from its package on; digits and dots leave the folders, so that versions of one package agree."""
    folder, _, name = PACKAGES.sub("", path, count=1).rpartition("/")
    return f"{re.sub(r'[-_]?[0-9][0-9.]*', '', folder)}/{name}"


def files_below(roots: Iterable[Path]) -> list[tuple[str, str]]:
    """(name, path) of files that may be text, in the order in which they are taken. Of two with one name, that of the earlier
    root.
    """
    found: dict[str, str] = {}
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = f"{folder}/{name}"
                if ENDING.search(name) or PACKED.search(path):
                    found.setdefault(name_of(path), path)
    return sorted(found.items(), key=lambda one: hashlib.sha256(os.fsencode(one[0])).digest())


def text_of(path: str) -> str | None:
    """A file's text, unpacked; None where it is empty, not UTF-8, a link, or cannot be read."""
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            text = file.read().decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None


def documents(found: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """(id, text, bytes of the text) of every file that is text, the same content once."""
    seen = set()
    for name, path in found:
        text = text_of(path)
        digest = hashlib.sha256((text or "").encode()).digest()
        if text is not None and digest not in seen:
            seen.add(digest)
            yield name.encode("utf-8", "replace").decode(), text, len(text.encode())


def gather(directory: Path, wanted: int, roots: Sequence[Path] = ()) -> Corpus:
    """Write about *wanted* bytes of text, or all that is below *roots* (by default what is installed), unless it is there.
    FileNotFoundError where there is none.
    """
    if not directory.exists():
        part = directory.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        places = list(roots) or installed()
        left = documents(files_below(places))
        for number in range(FILES):
            some, total = [], 0
            while total < wanted // FILES and (document := next(left, None)):
                some.append(document)
                total += document[2]
            if some:
                ids, texts, _ = zip(*some, strict=True)
                table = pa.table({"text": pa.array(texts, pa.string()), "id": pa.array(ids, pa.string())})
                table = table.replace_schema_metadata({TEXT_BYTES: str(total)})
                rows = max(ROW_GROUP_BYTES * len(some) // total, 1)
                pq.write_table(table, part / f"text-{number:05}.parquet", rows, compression="zstd")
        if not Corpus(part).paths:
            raise FileNotFoundError(f"no text below {', '.join(map(str, places))}. Install packages with documentation.")
        part.rename(directory)
    return Corpus(directory)


def texts_in(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of Parquet files."""
    for path in paths:
        yield from pq.read_table(path, columns=["text"])["text"].to_pylist()


def as_json_lines(corpus: Corpus, path: Path) -> Path:
    """Write the corpus as JSON lines, an object with `text` and `id` a line, in its order; return the path."""
    with path.open("w", encoding="utf-8") as lines:
        for source in corpus.paths:
            for batch in pq.ParquetFile(source).iter_batches():
                lines.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in batch.to_pylist())
    return path
