"""Source files found again, and their rows read as the build read them."""

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from flat_tokens.tools.corpus import CorpusFile, CorpusSource, open_corpus
from flat_tokens.tools.sources import Locator, places_of, read_rows
from flat_tokens.vocabulary import load_vocabulary
from tests.examples import first_fast
from tests.flat_tokens.demo import build_dataset
from tests.refusal import refusal
from tests.sources import parquet_bytes, write_arrow, write_rows

TEXTS = ["one", "", "zwei\nZeilen", "drei ☃", "quatre, 'cinq' \"six\"", "a" * 3000, "tab\tand\r\nmore", " sp ace "]
BYTES = load_vocabulary("bytes")


TABLE = pa.table({"id": np.arange(len(TEXTS)), "text": TEXTS})
ID = {"id_column": "id"}


def lines() -> bytes:
    """JSON lines with a byte order mark and a blank line, which is a row but no document."""
    objects = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(TEXTS)]
    return b"\xef\xbb\xbf" + b"\n".join([*objects[:2], b"", *objects[2:]])


def packed(compress: Callable[[bytes], bytes], data: bytes) -> bytes:
    """A file compressed in two halves, as appending makes them."""
    return compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


def table_of_values(delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([("id", "text"), *enumerate(TEXTS[:2])])
    out.write("\n")  # a blank line is no row
    csv.writer(out, delimiter=delimiter).writerows(enumerate(TEXTS[2:], 2))
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def archive(path: Path) -> None:
    write_rows(path, [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)], group=3)


PARQUET, LINES = parquet_bytes(TABLE, row_group_size=3), lines()
FILES: dict[str, tuple[Any, dict[str, Any]]] = {
    "x.parquet": (PARQUET, ID),
    "x.arrow": (lambda path: write_arrow(path, TABLE, 3, stream=True), ID),
    "x.jsonl": (LINES, ID),
    "y.jsonl": (LINES, {}),
    "x.txt.xz": (packed(lzma.compress, "--".join(TEXTS).encode()), {"document_separator": "--"}),
    "x.parquet.gz": (packed(gzip.compress, PARQUET), {}),
    "x.csv": (table_of_values(","), ID),
    "x.tsv": (table_of_values("\t"), {}),
    "y.txt": (TEXTS[2].encode(), {}),
    "bad.jsonl": (b'{"text": "a\\ud800b"}\n{"text": "a\xffb"}\n', {}),  # builds replace characters
    "bare.csv": (b'text\tid\n"said\t1\n', {"delimiter": "\t", "quotes": "none"}),
    "crlf.txt": (b"one\r\ntwo\r\n", {"document_separator": "\n"}),
    **dict.fromkeys(("x.tar.zst", "x.warc", "x.warc.gz"), (archive, ID)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("block_bytes", first_fast([7, 1 << 22]))
def test_every_document_is_read_again_as_the_build_read_it(tmp_path, monkeypatch, name, block_bytes):
    """Same key, same tokens, whichever way the file holds its rows."""
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", block_bytes)
    content, settings = FILES[name]
    content(tmp_path / name) if callable(content) else (tmp_path / name).write_bytes(content)
    source, documents = {"path": str(tmp_path / name), **settings}, {"on_bad": "replace"}
    build_dataset(tmp_path / "out", source=source, tokenizer="bytes", validation_fraction=0.4, documents=documents)
    corpus, seen = open_corpus(tmp_path / "out"), 0
    for split, sequences in corpus.splits.items():
        places = places_of(corpus, split, range(sequences.seq_count))
        tokens = {place.row: (place.key, sequences.sequence(i).tolist()) for i, place in enumerate(places)}
        for rows in (tokens, *([row] for row in tokens)):  # together, and each alone
            for file in {place.file for place in places}:
                found = Locator(corpus, trusted=True).find(file)
                assert found == str(tmp_path / name)
                read = read_rows(found, file, corpus.sources[0], rows)
                assert {row: (of.key, BYTES.encode(of.text).tolist()) for row, of in read.items()} == {
                    row: tokens[row] for row in rows
                }
        seen += len(tokens)
    assert seen == {"y.txt": 1, "bare.csv": 1, "bad.jsonl": 2, "crlf.txt": 2}.get(name, len(TEXTS))


def file_and_source(name: str, **settings: Any) -> tuple[CorpusFile, CorpusSource]:
    file = CorpusFile(0, 0, name, 0, "")
    return file, CorpusSource("source", "local files", None, {"format": "auto", "text_column": "text", **settings}, (file,))


def test_rows_that_are_no_documents_are_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\nno json\n[1]\n{"text": null}\n{"other": 1}\n\n{"text": 5}\n')
    assert set(read_rows(str(tmp_path / "x.jsonl"), *file_and_source("x.jsonl"), range(20))) == {0}


@pytest.mark.parametrize(
    ("name", "content", "settings", "complaint"),
    [
        ("x.parquet", PARQUET, {"text_column": "content"}, r"x\.parquet has .*'id', 'text'"),
        ("x.parquet", PARQUET[:200], {}, r"x\.parquet: cannot be read as parquet"),
        ("x.jsonl.gz", gzip.compress(LINES)[:80], {}, r"x\.jsonl\.gz: cannot be read as .*: x\.jsonl\.gz is damaged at byte"),
    ],
)
def test_a_file_without_its_column_or_its_end_is_refused_by_its_name(tmp_path, name, content, settings, complaint):
    """With the columns that are there. No row of it is read where none is wanted."""
    (tmp_path / name).write_bytes(content)
    place, *told = str(tmp_path / name), *file_and_source(name, **settings)
    assert read_rows(place, *told, []) == {}
    with refusal(complaint):
        read_rows(place, *told, [1])


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A dataset whose source has moved to the directory ``elsewhere``."""
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/x.parquet").write_bytes(PARQUET)
    build_dataset(tmp_path / "out", source={"path": str(tmp_path / "in")}, tokenizer="bytes")
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    return tmp_path


@pytest.mark.parametrize("given_path", ["elsewhere", "elsewhere/deep", "elsewhere/deep/x.parquet"])
def test_a_source_that_moved_is_found_where_the_user_says(moved, given_path):
    corpus = open_corpus(moved / "out")
    file = corpus.sources[0].files[0]
    assert Locator(corpus, trusted=True).find(file) is None
    assert Locator(corpus, [str(moved / given_path)]).find(file) == str(moved / "elsewhere/deep/x.parquet")
    with (moved / "elsewhere/deep/x.parquet").open("ab") as of_another_size:
        of_another_size.write(b"!")
    assert Locator(corpus, [str(moved / given_path)]).find(file) is None


def test_the_builds_unpacked_copy_is_found_where_the_source_is_gone(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(LINES, 0))  # a copy of more than eight times the size is not kept
    build_dataset(tmp_path / "out", source={"path": str(tmp_path / "x.jsonl.gz")}, tokenizer="bytes")
    (tmp_path / "x.jsonl.gz").unlink()
    corpus = open_corpus(tmp_path / "out")
    found = Locator(corpus, trusted=True).find(corpus.sources[0].files[0])
    assert found.startswith(str(tmp_path / "out/_cache/files"))
    assert Path(found).read_bytes() == LINES
