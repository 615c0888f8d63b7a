"""Reading documents: parsers that agree, files that change, damage that is found and never ends the process."""

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text import jsonl
from flat_tokens.text.formats import FileFormat
from flat_tokens.text.parquet import room_for_pages
from tasks.config import DocumentPolicy, Source
from tasks.models import Slice, SourceFile
from tasks.text.documents import Tally, read_documents
from tasks.text.files import stamp
from tests.damage import rewrite
from tests.examples import first_fast
from tests.refusal import refusal
from tests.slices import changed, range_of_slice, slices_of
from tests.sources import write_arrow
from tests.tasks.text.test_slices import WRITERS, Outcome, read
from tests.tasks.text.test_slices import source_file as unstamped

ROOT = Path(__file__).parents[3]


def source_file(path: Path, kind: FileFormat) -> SourceFile:
    """A file as it is now: whatever changes it is seen."""
    return unstamped(path, kind)._replace(stamp=stamp(str(path)))


def slice_of(path: Path, kind: FileFormat) -> Slice:
    """A whole file of bytes as one slice."""
    file = source_file(path, kind)
    return range_of_slice(file, 0, file.size, file.size)


def read_bytes(path: Path, data: bytes, kind: FileFormat, on_bad: str = "error", **settings: Any) -> Outcome:
    path.write_bytes(data)
    policy = DocumentPolicy.model_validate({"on_bad": on_bad, **settings.pop("documents", {})})
    return read(slice_of(path, kind), Source(path="x", **settings), policy)


def in_a_child(script: str, *arguments: str) -> str:
    """What a script prints, run where it may crash without taking the tests with it."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


JSON_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NESTED = st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(JSON_TEXT, inner, max_size=2))
OBJECTS = st.fixed_dictionaries(
    {"text": JSON_TEXT},
    optional={
        "id": JSON_TEXT | st.integers(-5, 2**70),
        "more": JSON_TEXT | st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | NESTED,
    },
)


def as_line(value: Any, ascii_only: bool, spaces: bool) -> bytes:
    return json.dumps(value, ensure_ascii=ascii_only, separators=None if spaces else (",", ":")).encode()


LINES = st.one_of(
    st.builds(as_line, OBJECTS, st.booleans(), st.booleans()),
    st.sampled_from(
        [
            b"",
            b" ",
            b"\r",
            b"{}",
            b'{"text":"a"}\r',
            b' {"text":"a"} ',
            b'{"text":"a"}{"text":"b"}',
            b'{"text":"a"} {"text":"b"}',
            b'{"text":"a","more":{"x":1}',
            b',"more":2}',
            b'{"text":"a","text":"b"}',
            b'{"id":1,"text":"a","id":"2"}',
            b'{"text":"a","more":NaN}',
            b'{"text":"a","more":-Infinity}',
            b'{"text":"a","more":1e999}',
            b'{"text":"a\tb"}',
            b'{"text":"a\0b"}',
            b'{"text":"a\\u0000b"}',
            b'{"text":"\\ud800"}',
            b'{"text":"a\\udfffb"}',
            b'{"text":"\\ude00\\ud83d"}',
            b'{"text":"\\ud83d\\ude00"}',
            b'{"text":"\\udcc3\\udca9"}',
            b'{"text":"\xff"}',
            b'{"text":"\xe4\xb8"}',
            b'{"text":"\xed\xa0\x80"}',
            b'{"text":"a","more":"\xff\\ud800"}',
            b'{"text":"a","\xff":1}',
            b'{"text":"a","id":"\xff"}',
            b'{"text":"a","id":"\\ud800"}',
            b'{"text":"a","id":1.0}',
            b'{"text":"a","id":-0}',
            b'{"text":"a","id":null}',
            b'{"text":"a","id":[1]}',
            b'{"te\\u0078t":"a"}',
            b'{"text":1}',
            b'{"text":{"text":"a"}}',
            b'["text"]',
            b'"text"',
            b"\xef\xbb\xbf",
            b'\xef\xbb\xbf{"text":"a"}',
            b'{"text":"a",}',
            b"{'text':'a'}",
            b'{"text":"a"} // more',
        ]
    ),
)


@given(
    lines=st.lists(LINES, max_size=6), with_ids=st.booleans(), on_bad=st.sampled_from(["skip", "replace"]), cut=st.integers(0, 40)
)
@example(lines=[b'{"text":"a","more":{"x":1}', b',"more":2}{"text":"b"}'], with_ids=False, on_bad="skip", cut=0)
def test_the_fast_parser_reads_what_the_slow_one_reads(
    tmp_path,
    monkeypatch,
    lines,
    with_ids,
    on_bad,
    cut,
):
    """Documents, keys, rows and counts; so what comes of a line does not depend on its neighbours, which choose the parser."""
    data = b"\n".join(lines)[cut:]
    settings = {"id_column": "id"} if with_ids else {}
    quickly = read_bytes(tmp_path / "a.jsonl", data, "jsonl", on_bad, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "_parse_fast", lambda *_: None)  # lines are looked at one by one
        assert read_bytes(tmp_path / "a.jsonl", data, "jsonl", on_bad, **settings) == quickly


def test_plain_lines_take_the_fast_parser(tmp_path, monkeypatch):
    """So do lines of source code, with as many brackets as they have: within texts they are no nesting."""
    monkeypatch.setattr(jsonl, "_parse_lines", None)
    texts = ['"' + "[" * 5000, "\\" + " {" * 5000, '\\"\\\\"' + "[[" * 5000, "{[" * 500, "} or null", "\n"]
    data = b"".join(as_line({"more": [{"x": None}, "\\"], "text": text}, True, True) + b"\r\n" for text in texts)
    assert [text for text, _, _ in read_bytes(tmp_path / "a.jsonl", data, "jsonl").documents] == texts


HOSTILE_LINES = [
    # lines, the texts of their documents, and what was skipped
    (b'null\n{"text":"a"}\n', ["a"], {"wrong_type": 1}),
    (b'{"text":"a"} null{"text":"b"}\n', [], {"malformed": 1}),
    (b'{"text":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", [], {"malformed": 1}),
    (b'{"text":"a","x":' + b'{"x":' * 50_000 + b"1" + b"}" * 50_000 + b"}\n", [], {"malformed": 1}),
]


def test_lines_that_crash_a_parser_are_bad_documents(tmp_path):
    for number, (data, _, _) in enumerate(HOSTILE_LINES):
        (tmp_path / f"{number}").write_bytes(data)
    script = """
import json, sys
from pathlib import Path
from tests.tasks.text.test_documents import read_bytes
for path in sorted(Path(sys.argv[1]).iterdir()):
    outcome = read_bytes(path, path.read_bytes(), "jsonl", "skip")
    print(json.dumps([[text for text, _, _ in outcome.documents], dict(outcome.tally.skipped)]))
"""
    found = in_a_child(script, str(tmp_path)).splitlines()
    assert list(map(json.loads, found)) == [found for _, *found in HOSTILE_LINES]


FLIP_BITS = """
import os, sys
from collections import Counter
from pathlib import Path
from tests.tasks.text.test_documents import read_all

path, kind, begin, end, step = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
good, expected = path.read_bytes(), read_all(path, kind)

def outcome(position):
    data = bytearray(good)
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)
    try:
        found = read_all(path, kind)
    except ValueError:
        return b"refused"
    except BaseException:
        return b"traceback"
    return b"same" if found == expected else b"other" if len(found) == len(expected) else b"lost"

positions, seen = list(range(8 * begin, 8 * end, step)), []
while len(seen) < len(positions):
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for position in positions[len(seen):]:
            os.write(send, outcome(position) + b"\\n")
        os._exit(0)
    os.close(send)
    with open(receive) as results:
        seen += results.read().split()
    if os.waitpid(child, 0)[1]:
        seen.append("crash")
path.write_bytes(good)
print(repr(dict(Counter(seen))))
"""


def read_all(path: Path, kind: FileFormat, **policy: Any) -> list[tuple[str, int, int]]:
    source = Source(path="x")
    slices = slices_of(source_file(path, kind), source, 200)
    return [d for part in slices for d in read(part, source, DocumentPolicy(on_bad="replace", **policy)).documents]


def flip_bits(path: Path, kind: FileFormat, begin: int, end: int, step: int) -> dict[str, int]:
    """How often one wrong bit of the bytes ``begin:end``, in every *step*-th place, made no difference, other documents, fewer,
    or an error.
    """
    found = eval(in_a_child(FLIP_BITS, str(path), kind, str(begin), str(end), str(step)))
    assert isinstance(found, dict)
    return found


FORTY = pa.table({"text": [f"text {i} of forty texts" * (i % 5) for i in range(40)]})


@pytest.mark.parametrize(
    ("footer", "options"),
    [
        (False, {"row_group_size": 15, "compression": "zstd"}),
        pytest.param(True, {"store_schema": False, "write_statistics": False}, marks=pytest.mark.slow),
    ],
    ids=["pages", "footer"],
)
def test_every_wrong_bit_of_a_parquet_file_with_checksums_is_found(tmp_path, footer, options):
    """The footer has no checksum, so another type is possible, but not silence, and not the end of the process."""
    path = tmp_path / "a.parquet"
    pq.write_table(FORTY, path, write_page_checksum=True, **options)
    data = path.read_bytes()
    middle = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    found = flip_bits(path, "parquet", *((middle, len(data), 3) if footer else (4, middle, 131)))
    assert set(found) <= {"same", "refused", *(["other"] if footer else [])}
    assert found["refused"] > (60 if footer else 30)


def test_a_parquet_reader_that_ends_early_is_an_error(tmp_path, monkeypatch):
    """As it does behind some damaged page headers."""
    path = tmp_path / "a.parquet"
    pq.write_table(FORTY, path, row_group_size=15)
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *arguments, **settings: iter(list(whole(*arguments, **settings))[:-1])
    )
    with refusal(r"a.parquet\[0:1\]@0 cannot be read to its end: it ends after 0 of 3 rows"):
        read_all(path, "parquet")


IN_LITTLE_MEMORY = """
import json, sys
from pathlib import Path
import pyarrow as pa
from flat_tokens.text import limits
from tests.slices import slices_of
from tests.tasks.text.test_documents import read_documents, source_file, DocumentPolicy, Source, Tally

limits.BATCH_BYTES, limits.LARGEST_BATCH = 1 << 20, 8 << 20
path = Path(sys.argv[1])
source = Source(path="x", id_column="text")
before, documents, size, largest = pa.total_allocated_bytes(), 0, 0, 0
for part in slices_of(source_file(path, path.suffix[1:]), source, 1 << 30):
    for batch in read_documents(part, source, DocumentPolicy(), Tally()):
        documents += len(batch.texts)
        size += batch.texts.nbytes
        largest = max(largest, batch.texts.nbytes)
print(json.dumps([documents, size, largest, pa.default_memory_pool().max_memory() - before]))
"""


def write_parquet(path: Path, texts: pa.Array | list[str], **options: Any) -> Path:
    pq.write_table(pa.table({"text": texts}), path, **options)
    return path


LONG = "text " * 20_000
MANY = 1500


def of_a_dictionary(short: int) -> pa.DictionaryArray:
    """One long text over and over again, behind some short ones."""
    places = pa.array([*range(1, short + 1), *[0] * (MANY - short)], pa.int32())
    return pa.DictionaryArray.from_arrays(places, pa.array([LONG, *(f"short {i}" for i in range(short))]))


def views() -> pa.Array:
    """As many views of one text."""
    view = len(LONG).to_bytes(4, "little") + LONG[:4].encode() + bytes(8)
    return pa.Array.from_buffers(pa.string_view(), MANY, [None, pa.py_buffer(view * MANY), pa.py_buffer(LONG.encode())])


SMALL_IN_THE_FILE = {
    # texts, and how Parquet stores them; without that it is Arrow
    "dictionary": (of_a_dictionary(0), {"store_schema": False}),
    "dictionary in other pages": (
        of_a_dictionary(10),
        {"store_schema": False, "data_page_version": "2.0", "compression": "zstd"},
    ),
    "what the text before has": ([LONG] * MANY, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}),
    "Arrow dictionary": (of_a_dictionary(0), None),
    "Arrow views": (views(), None),
}


@pytest.mark.parametrize("made", first_fast(SMALL_IN_THE_FILE.values(), every=3), ids=SMALL_IN_THE_FILE)
def test_a_small_file_that_stands_for_much_text_takes_little_memory(tmp_path, made):
    """A hundred megabytes of text from some hundred kilobytes, by a reader that is allowed eight megabytes at a time."""
    texts, options = made
    path = tmp_path / ("a.arrow" if options is None else "a.parquet")
    if options is None:
        write_arrow(path, pa.table({"text": texts}))
    else:
        write_parquet(path, texts, **options)
    assert path.stat().st_size < 2_000_000
    documents, size, largest, peak = json.loads(in_a_child(IN_LITTLE_MEMORY, str(path)))
    assert documents == MANY
    assert size > 85_000_000
    assert largest < 2_000_000
    assert peak < 40_000_000


def test_a_page_that_is_larger_than_a_document_may_make_it_is_an_error(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ["x" * 1000] * 1000, use_dictionary=False, compression="zstd")
    monkeypatch.setattr("flat_tokens.text.limits.LARGEST_PAGE", 1 << 19)
    with refusal(
        r"^a.parquet: column 'text' cannot be read: a page of it has 1,00\d,\d+ bytes when it is unpacked; "
        r"524,288 are allowed. Write the file with smaller pages, or raise documents.max_bytes.$"
    ):
        read_all(path, "parquet", max_bytes=1 << 18)
    assert len(read_all(path, "parquet", max_bytes=1 << 20)) == 1000


def test_headers_of_pages_that_cannot_be_read_are_an_error(tmp_path):
    """What they say bounds the memory. Whether the library would read the pages does not matter."""
    path = write_parquet(tmp_path / "a.parquet", [f"text {i}" for i in range(1000)], use_dictionary=False, compression="none")
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start + 1 : start + 12] = b"\x80" + b"\xff" * 10  # its kind goes on without end
    path.write_bytes(data)
    with refusal(r"^a.parquet: column 'text' cannot be read: a page header of it is damaged"):
        read_all(path, "parquet")


def test_who_needs_more_room_than_is_left_waits_and_goes_on_alone(monkeypatch):
    monkeypatch.setattr("flat_tokens.text.limits.LARGEST_PAGE", 10)
    entered, order = threading.Event(), []

    def large() -> None:
        with room_for_pages(100):
            order.append("large")

    with room_for_pages(6):
        with room_for_pages(4):
            entered.set()
        thread = threading.Thread(target=large)
        thread.start()
        order.append("small ones are done")
    thread.join()
    assert entered.is_set()
    assert order == ["small ones are done", "large"]


@pytest.mark.parametrize("type_", first_fast([pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]), ids=str)
def test_no_wrong_bit_in_an_arrow_file_ends_the_process(tmp_path, type_):
    """Arrow files have no checksums, so other text is possible; offsets that lead astray are found."""
    path = tmp_path / "a.arrow"
    write_arrow(path, FORTY.cast(pa.schema({"text": type_})), 15)
    found = flip_bits(path, "arrow", 0, path.stat().st_size, 179)
    assert set(found) <= {"same", "other", "lost", "refused"}
    assert found["refused"] > 20


def test_a_parquet_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(FORTY, path, row_group_size=15)
    data = path.read_bytes()
    for length in range(4, len(data), 101):
        path.write_bytes(data[:length])
        with refusal(r"a.parquet cannot be read as parquet: "):
            read_all(path, "parquet")


@pytest.mark.parametrize(
    ("kind", "content"),
    [("jsonl", b'{"text":"%s"}\n{"text":"last"}\n'), ("text", b"%s###last")],
)
def test_a_line_over_the_cap_is_not_held_in_memory(tmp_path, monkeypatch, kind, content):
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", 1 << 16)
    monkeypatch.setattr("flat_tokens.text.limits.LONGEST_LINE", 1 << 18)
    path = tmp_path / "a"
    path.write_bytes(content % (b"x" * (32 << 20)))
    part, source = slice_of(path, kind), Source(path="x", document_separator="###" if kind == "text" else None)
    tracemalloc.start()
    try:
        outcome = read(part, source, DocumentPolicy(on_bad="skip", max_bytes=1 << 17))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(text, row) for text, _, row in outcome.documents] == [("last", 1)]
    assert (outcome.tally.read, outcome.tally.skipped) == (2, {"too_long": 1})
    assert peak < 2 << 20


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_whether_a_document_is_too_long_does_not_depend_on_blocks(tmp_path, monkeypatch, block):
    """The text decides, up to lines of twice the cap; longer ones are not looked into."""
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", block)
    monkeypatch.setattr("flat_tokens.text.limits.LONGEST_LINE", 0)
    lines = [
        b'{"text":"%s"}' % (b"x" * 40),  # 51 bytes: the text is as long as allowed
        b'{"text":"%s"}' % (b"x" * 41),
        b'{"text":"a","more":"%s"}' % (b"x" * 58),  # 80 bytes, but little text
        b'{"text":"a","more":"%s"}' % (b"x" * 59),  # 81 bytes
        b'{"text":"last"}',
    ]
    outcome = read_bytes(tmp_path / "a.jsonl", b"\n".join(lines), "jsonl", "skip", documents={"max_bytes": 40})
    assert [(len(text), row) for text, _, row in outcome.documents] == [(40, 0), (1, 2), (4, 4)]
    assert outcome.tally.skipped == {"too_long": 2}


@pytest.mark.parametrize("meddle", [rewrite, Path.unlink, lambda path: os.truncate(path, 100)], ids=["changed", "removed", "cut"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch, name, meddle):
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", 64)
    path, source, (kind, write) = tmp_path / "a", Source(path="x"), WRITERS[name]
    write(path, pa.table({"text": [f"text {i}" for i in range(100)]}), 100)
    (part,) = slices_of(source_file(path, kind), source, 1 << 20)
    policy = DocumentPolicy(on_bad="skip")
    batches = read_documents(part, source, policy, Tally())
    next(batches)
    meddle(path)
    with refusal(r"^a changed while the build read it. Run the build again when the file is complete.$"):
        list(batches)
    with refusal("changed while the build read it"):
        next(read_documents(part, source, policy, Tally()))


@pytest.mark.parametrize("length", [0, 5, 30])
def test_a_file_shorter_than_its_slice_is_an_error_not_a_wait(tmp_path, length):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 60)
    part = slice_of(path, "jsonl")
    os.truncate(path, length)
    part = changed(part, file=part.ranges[0].file._replace(stamp=()))
    with refusal(r"a.jsonl\[0:60\] cannot be read to its end: it ends \d+ bytes before its length"):
        read(part, Source(path="x"), DocumentPolicy(on_bad="skip"))
