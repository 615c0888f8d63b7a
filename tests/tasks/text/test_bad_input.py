"""Bad documents, files and configurations: what a build makes of them, and what a person is told."""

import base64
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet.encryption import CryptoFactory, EncryptionConfiguration, KmsClient, KmsConnectionConfig
from tokenizers import Tokenizer, models, pre_tokenizers

import flat_tokens
from flows.pipelines.build import BuildResult, build
from flows.pipelines.stages import TOKENIZE, Step
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tests.damage import rewrite
from tests.faults.support import build_here, settings_of
from tests.sources import arrow_bytes, held, parquet_bytes, write_rows

SPECIAL = "<|endoftext|><|im_start|></s>[MASK]"


def run(tmp_path: Path, path: Path | str, runner: Callable[[int], Threads] = Threads, **settings: Any) -> BuildResult:
    """Build what is at *path*."""
    source = {"path": str(path), **(settings.pop("source", None) or {})}
    defaults = {"output": str(tmp_path / "out"), "tokenizer": "bytes", "validation_fraction": 0, "source": source}
    with runner(2) as threads:
        return build(BuildConfig.model_validate({**defaults, **settings}), threads)


def texts_of(result: BuildResult) -> list[str]:
    """The documents of a dataset of bytes, once all of it is checked."""
    return [one.text for one in held(result.path)["train"]]


def refuse(tmp_path: Path, path: Path | str, words: str, **settings: Any) -> None:
    """A build is refused with these words and leaves no dataset."""
    with pytest.raises((ValueError, OSError), match=words) as refused:
        run(tmp_path, path, **settings)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out/latest.json").exists()
    assert not (tmp_path / "out/_staging").exists()


def jsonl(line: bytes) -> bytes:
    return b'{"id": 0, "text": "first"}\n%s\n{"id": 2, "text": "last"}\n' % line


def parquet(texts: pa.Array | pa.Table, **more: pa.Array) -> bytes:
    table = texts if isinstance(texts, pa.Table) else pa.table({"text": texts, **more})
    return parquet_bytes(table, write_page_checksum=True)


class _Keys(KmsClient):  # type: ignore[misc]
    """Keys that are kept as they are."""

    def wrap_key(self, key: bytes, master: str) -> bytes:
        return base64.b64encode(key)


def encrypted(*, plaintext_footer: bool, column: str = "text") -> bytes:
    """Parquet of which one column is encrypted, and the footer, or not."""
    settings = EncryptionConfiguration("footer", column_keys={"key": [column]}, plaintext_footer=plaintext_footer)
    factory = CryptoFactory(lambda _: _Keys())
    properties = factory.file_encryption_properties(KmsConnectionConfig(), settings)
    sink, table = io.BytesIO(), pa.table({"text": ["a"], "id": ["b"]})
    with pq.ParquetWriter(sink, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return sink.getvalue()


def arrow(texts: pa.Array | pa.Table, stream: bool = False) -> bytes:
    return arrow_bytes(texts if isinstance(texts, pa.Table) else pa.table({"text": texts}), stream=stream)


Settings = dict[str, Any]


class Bad(NamedTuple):
    """A file of three documents of which the second is bad: why, and what is left of it under 'replace', if anything."""

    name: str
    content: bytes
    reason: str
    words: str
    replaced: str | None = None
    source: Settings | None = None
    settings: Settings | None = None


IDS = {"id_column": "id"}
SHORT = {"max_bytes": 20}
NO_UNICODE = "the text is not valid UTF-8"
LINES = {
    # the second of three lines, the reason, the words, and what replaces the text
    "null": (b'{"text": null}', "null", "the text is null"),
    "missing key": (b'{"body": "a"}', "null", "the line has no key 'text'"),
    "integer": (b'{"text": 7}', "wrong_type", "'text' is a JSON number, not a string"),
    "messages": (
        b'{"text": [{}]}',
        "wrong_type",
        "'text' is a JSON array, not a string; a list of messages is source.messages_c",
    ),
    "line is an array": (b'["a"]', "wrong_type", "the line is a JSON array, not an object"),
    "line is a null": (b"null", "wrong_type", "the line is a JSON null, not an object"),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}', "malformed", "the line is not JSON (Extra data"),
    "cut line": (b'{"text": "a', "malformed", "the line is not JSON (Unterminated string starting at column 10)"),
    "BOM within": (b'\xef\xbb\xbf{"text": "a"}', "malformed", "the line is not JSON (Unexpected UTF-8 BOM"),
    "nested 50,000 deep": (b'{"text": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "malformed", "nested too deep"),
    "high surrogate": (b'{"text": "a\\ud800"}', "invalid_unicode", NO_UNICODE, "a\ufffd"),
    "surrogates that spell bytes of UTF-8": (b'{"text": "\\udcc3\\udca9"}', "invalid_unicode", NO_UNICODE, "\ufffd\ufffd"),
    "JSON that is Latin-1": (b'{"text": "caf\xe9 x"}', "invalid_unicode", NO_UNICODE, "caf\ufffd x"),
}
LINES_WITH_IDS = {
    "null id": (b'{"id": null, "text": "a"}', "null_id", "the id is null"),
    "missing id": (b'{"text": "a"}', "null_id", "the line has no key 'id'"),
    "boolean id": (b'{"id": true, "text": "a"}', "wrong_type", "'id' is a JSON boolean, not a string or an integer"),
    "surrogate in an id": (b'{"id": "\\ud800", "text": "a"}', "invalid_unicode", "'id' is not valid UTF-8"),
}
BAD = {
    **{case: Bad("a.jsonl", jsonl(line), *facts) for case, (line, *facts) in LINES.items()},
    **{case: Bad("a.jsonl", jsonl(line), *facts, source=IDS) for case, (line, *facts) in LINES_WITH_IDS.items()},
    "JSON line too long": Bad(
        "a.jsonl", jsonl(b'{"text": "%s"}' % (b"x" * 21)), "too_long", "has 21 bytes or more", settings=SHORT
    ),
    "null in Parquet": Bad("a.parquet", parquet(pa.array(["first", None, "last"])), "null", "the text is null"),
    "invalid UTF-8 in Parquet": Bad(
        "a.parquet", parquet(pa.array([b"first", b"a\xff\xfeb", b"last"])), "invalid_unicode", NO_UNICODE, "a\ufffd\ufffdb"
    ),
    "null id in Parquet": Bad(
        "a.parquet", parquet(pa.array(["first", "a", "last"]), id=pa.array([1, None, 3])), "null_id", "the id is null", source=IDS
    ),
    "too long in Parquet": Bad(
        "a.parquet", parquet(pa.array(["first", "x" * 21, "last"])), "too_long", "has 21 bytes", settings=SHORT
    ),
    "invalid UTF-8 in CSV": Bad("a.csv", b"text\nfirst\na\xe9\nlast\n", "invalid_unicode", NO_UNICODE, "a\ufffd"),
    "CSV row of more columns": Bad("a.csv", b"id,text\n1,first\n2,a,b\n3,last\n", "malformed", "has 3 columns instead of 2"),
    "CSV text behind a quote": Bad(
        "a.csv", b'text\nfirst\n"a"b\nlast\n', "malformed", "the row is not CSV (',' expected after '\"')"
    ),
    "invalid UTF-8 in text": Bad(
        "a.txt", b"first\n\na\xff\n\nlast", "invalid_unicode", NO_UNICODE, "a\ufffd", {"document_separator": "\n\n"}
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_document_stops_the_build_with_file_row_and_remedy(tmp_path, bad):
    (tmp_path / bad.name).write_bytes(bad.content)
    remedy = r"Repair it, or set documents\.on_bad to 'skip' or 'replace'"
    row = r"line 2 \(row 1\)" if bad.name.startswith("a.jsonl") else "row 1"
    words = rf"^{bad.name}, {row}: .*{re.escape(bad.words)}.*\[{bad.reason}\]\. {remedy}"
    refuse(tmp_path, tmp_path / bad.name, words, documents=bad.settings, source=bad.source)


Files = Mapping[str, tuple[str, bytes, Settings | None]]
"""Case -> name of the file, content and settings of its source."""


def built(tmp_path: Path, files: Files, **documents: Any) -> dict[str, tuple[list[str], dict[str, int]]]:
    """The texts of each case, and what was skipped, of one build with a source for each."""
    sources = []
    for number, (name, content, settings) in enumerate(files.values()):
        path = tmp_path / f"{number}-{name}"
        path.write_bytes(content)
        sources.append({"name": str(number), "path": str(path), **(settings or {})})
    result = build_here(settings_of(tmp_path / "out", sources=sources, documents=documents, validation_fraction=0))
    docs, found = held(result.path)["train"], {}
    for number, (case, one) in enumerate(zip(files, result.totals["documents"]["by_source"], strict=True)):
        texts = [doc.text for doc in docs if doc.file == number]
        assert (one["read"], one["written"]) == (len(texts) + sum(one["skipped"].values()), len(texts))
        found[case] = (texts, one["skipped"])
    return found


@pytest.mark.parametrize("on_bad", ["skip", "replace"])
@pytest.mark.parametrize("settings", [None, SHORT], ids=str)
def test_a_bad_document_is_replaced_or_left_out_and_counted(tmp_path, on_bad, settings):
    """Where nothing replaces it, 'replace' leaves it out as 'skip' does."""
    files, expected = {}, {}
    for case, bad in BAD.items():
        if bad.settings == settings:
            files[case] = (bad.name, bad.content, bad.source)
            stays = on_bad == "replace" and bad.replaced is not None
            expected[case] = (["first", bad.replaced, "last"], {}) if stays else (["first", "last"], {bad.reason: 1})
    assert built(tmp_path, files, on_bad=on_bad, **(settings or {})) == expected
    replaced = flat_tokens.open(tmp_path / "out").manifest["totals"]["documents"]["replaced"]
    assert sum(replaced.values()) == sum(skipped == {} for _, skipped in expected.values())


GOOD = {
    # files of each name: their content, the texts, and settings of their source
    "a.jsonl": {
        "blank lines": (b'\n{"text": "a"}\n \t\r\n\n{"text": "b"}\n\n', ["a", "b"]),
        "BOM before JSON": (b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
        "of repeated keys the last one counts": (b'{"text": "a", "text": "b"}\n', ["b"]),
        "a key that is no Unicode": (b'{"text": "a", "\\ud800": 1}\n{"\\udfff": 2, "text": "b"}\n', ["a", "b"]),
        "NaN beside the text": (b'{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n', ["a", "b"]),
        "huge integers as ids": (b'{"text": "a", "id": %s}\n{"text": "b", "id": -5}\n' % (b"9" * 400), ["a", "b"], IDS),
        "strings and integers as ids": (b'{"text": "a", "id": "x"}\n{"text": "b", "id": 5}\n', ["a", "b"], IDS),
        "surrogate pairs in JSON": (b'{"text": "\\ud83d\\ude00"}\n', ["😀"]),
        "special tokens in JSON": (json.dumps({"text": SPECIAL}).encode(), [SPECIAL]),
        "nested 300 deep": (b'{"text": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}\n", ["a"]),
        "2,000 arrays side by side": (b'{"text": "a", "x": [' + b"[]," * 2000 + b"[]]}\n", ["a"]),
        "JSON read as text": (b'{"text": "a"}\n', ['{"text": "a"}\n'], {"format": "text"}),
        "Parquet in a file called .jsonl": (parquet(pa.array(["a"])), ["a"]),
    },
    "a.txt": {
        "text as it is": ("a\0b\r\nc\ufeff\n é".encode(), ["a\0b\r\nc\ufeff\n é"]),
        "BOM before text": (b"\xef\xbb\xbf\xef\xbb\xbfa", ["\ufeffa"]),
        "text that is only a BOM": (b"\xef\xbb\xbf", []),
        "text between separators": (b"a\r\n--\r\nb--", ["a\r\n", "\r\nb"], {"document_separator": "--"}),
        "lines that end in CR LF": (
            b"a\r\n\r\nb\rc\r\nd\ne\r",
            ["a", "", "b\rc", "d", "e\r"],
            {"document_separator": "\n"},
        ),
    },
    "a.csv": {
        "BOM before CSV": (b"\xef\xbb\xbftext\na\n", ["a"]),
        "awkward values in CSV": (b'id,text\r\n1,"a\r\n""b"""\r\n2,c\0d\r\n3,NULL\r\n', ['a\r\n"b"', "c\0d", "NULL"]),
    },
    "a.tsv": {"TSV": (b"id\ttext\n1\ta,b\n", ["a,b"])},
    "a.parquet": {
        "another column that is encrypted": (encrypted(plaintext_footer=True, column="id"), ["a"]),
        "JSON in a file called .parquet, told so": (jsonl(b'{"text": "b"}'), ["first", "b", "last"], {"format": "jsonl"}),
    },
    "a.jsonl.gz": {"packed in several parts": (gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}'), ["a", "b"])},
}


def test_what_is_only_unusual_is_kept_as_it_is(tmp_path):
    files, expected = {}, {}
    for name, cases in GOOD.items():
        for case, (content, texts, *source) in cases.items():
            files[case] = (name, content, dict(*source))
            expected[case] = (texts, {})
    assert built(tmp_path, files) == expected


EMPTY: Files = {
    "JSON": ("a.jsonl", b'{"text": "a"}\n{"text": ""}\n{"text": "b"}\n{"text": ""}\n{"text": ""}\n', {}),
    "Parquet": ("a.parquet", parquet(pa.array(["a", "", "b", "", ""])), {}),
    "Arrow": ("a.arrow", arrow(pa.array(["a", "", "b", "", ""])), {}),
    "CSV": ("a.csv", b'text\na\n""\nb\n""\n""\n', {}),
    "text": ("a.txt", b"a||b|||", {"document_separator": "|"}),
    "lines": ("a.txt", b"a\r\n\r\nb\r\n\r\n\r\n", {"document_separator": "\n"}),
}


def test_an_empty_text_is_a_sequence_or_counted_and_never_marks_its_neighbour(tmp_path):
    """The lowest bit of a token says that a sequence begins with it: exactly those of texts that are not empty."""
    assert built(tmp_path, EMPTY) == dict.fromkeys(EMPTY, (["a", "", "b", "", ""], {}))
    train = flat_tokens.open(tmp_path / "out").train
    assert train.seq_starts.read(0, 31).tolist() == [0, *(2 * k + n for k in range(6) for n in (1, 1, 2, 2, 2))]
    assert train.encoded_tokens.read(0, 12).tolist() == 6 * [(ord("a") + 1) * 2 + 1, (ord("b") + 1) * 2 + 1]
    assert built(tmp_path, EMPTY, empty="skip") == dict.fromkeys(EMPTY, (["a", "b"], {"empty": 3}))


def test_a_document_that_the_tokenizer_does_not_take_is_a_bad_document(tmp_path):
    """The error names file and row, and says what the engine says; the policies that skip count it."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "two one", "one three", "", "two", "four")])
    made = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    settings = {"tokenizer": str(tmp_path / "words.json"), "slice_bytes": 30}
    refuse(
        tmp_path,
        path,
        r"^a.jsonl, line 3 .row 2.: tokenizer '.*words.json' cannot encode the document \(Exception: .*Missing \[UNK\] token.*\) "
        r"\[unencodable\]\. Repair it, or set documents\.on_bad to 'skip'",
        **settings,
    )
    for policy in ("skip", "replace"):
        result = run(tmp_path, path, documents={"on_bad": policy}, **settings)
        documents = result.totals["documents"]
        assert (documents["read"], documents["written"], documents["skipped"]) == (6, 4, {"unencodable": 2})
        assert documents["text_bytes"] == len("onetwo onetwo")
        assert [one.ids for one in held(result.path)["train"]] == [[0], [1, 0], [], [1]]


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


PLAIN = b'{"text": "a"}\n{"text": "b"}\n' * 50
PAGES = parquet(pa.array([f"text number {i}" for i in range(500)]))
TWICE = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])


class File(NamedTuple):
    """A file that is refused, the words, other settings, and what is in its directory, too."""

    name: str
    content: bytes
    words: str
    settings: Settings | None = None
    beside: Mapping[str, bytes] | None = None


FILES = {
    "zero bytes among others": File("b.jsonl", b"", r"^b.jsonl is empty \(0 bytes\)", beside={"a.jsonl": PLAIN}),
    "Parquet cut": File("a.parquet", PAGES[:-20], r"^a.parquet cannot be read as parquet: .*magic bytes"),
    "wrong bit in a page": File("a.parquet", flip(PAGES, 200), r"^a.parquet\[0:1\] cannot be read to its end: .*CRC"),
    "Arrow cut": File("a.arrow", arrow(pa.array(["a"] * 9))[:-20], r"^a.arrow cannot be read as arrow: "),
    "Arrow streams put together": File(
        "a.arrow",
        arrow(pa.array(["a"] * 9), stream=True) + arrow(pa.array(["b"]), stream=True),
        r"^a.arrow has more bytes after the end of its stream",
    ),
    "Parquet with an encrypted footer": File(
        "a.parquet",
        encrypted(plaintext_footer=False),
        r"^a.parquet is encrypted Parquet, for which there are no keys here. Write it without encryption first",
    ),
    "Parquet with an encrypted column": File(
        "a.parquet",
        encrypted(plaintext_footer=True),
        r"^a.parquet: a column of 'text' is encrypted, and there are no keys here. Write it without encryption first",
    ),
    "a directory for an id": File(
        "k=v/a.parquet",
        parquet(pa.array(["a"])),
        r"^k=v/a.parquet has no column 'k'; it has 'text'. Directories, such as k=v, give columns to source.keep_columns alone",
        {"source": {"id_column": "k"}},
    ),
    "text called Parquet": File(
        "a.parquet", b"plain text", r"^a.parquet is not parquet: it begins with b'plain te'. Set source.format"
    ),
    "Parquet said to be JSON": File(
        "a.parquet",
        PAGES,
        r"^a.parquet is parquet, not jsonl. Leave source.format out, or repair the file",
        {"source": {"format": "jsonl"}},
    ),
    "unknown format": File(
        "a.bin", b"\x7fELF\x02", r"^cannot tell the format of a.bin, which begins with b'\\x7fELF.*Set source.format"
    ),
    "one JSON array": File(
        "a.json",
        b'\xef\xbb\xbf \n [{"text": "a"}]',
        r"^a.json is one JSON array, not one JSON object a line. Convert it first: jq -c '.\[\]' a.json",
    ),
    "mixed formats": File(
        "README.md",
        b"# About",
        r"^the source holds files of several formats: jsonl \(b.jsonl\), parquet \(a.parquet\), text \(README.md\)\. Set",
        beside={"a.parquet": PAGES, "b.jsonl": PLAIN},
    ),
    "no such column in Parquet": File(
        "a.parquet",
        parquet(pa.array(["a"]), title=pa.array(["b"])),
        r"^a.parquet has no column 'body'; it has 'text', 'title'. Set source.text_column",
        {"source": {"text_column": "body"}},
    ),
    "no such key in JSON": File("a.jsonl", b'{"id": 1, "txt": "a"}\n', r"^a.jsonl has no column 'text'; it has 'id', 'txt'"),
    "no header in CSV": File("a.csv", b"\n\n", r"^a.csv has no column 'text'; it has none"),
    "id of plain text": File(
        "a.txt", b"text", r"^a.txt is plain text, which has no column 'id'. Leave source.id_column out", {"source": IDS}
    ),
    "name of a column that is not UTF-8": File(
        "a.arrow",
        arrow(pa.array(["a"])).replace(b"text", b"tex\xff"),
        r"^a.arrow cannot be read as arrow: 'utf-8' codec can't decode",
    ),
    "column of messages": File(
        "a.parquet",
        parquet(pa.array([[{"role": "user"}]])),
        r"^a.parquet: column 'text' is list<.*, not text. Set .* to another column, or source.messages_column to this",
    ),
    "fractions as ids": File(
        "a.parquet",
        parquet(pa.array(["a"]), id=pa.array([1.5])),
        r"^a.parquet: column 'id' is double, not text or integers. Set source.id_column",
        {"source": IDS},
    ),
    "two columns of one name in Arrow": File(
        "a.arrow", arrow(TWICE), r"^a.arrow has 2 columns named 'text'; give them different names"
    ),
    "quote that is not closed": File(
        "a.csv",
        b'id,text\n1,a\n2,"b\n3,c\n',
        r"^a.csv, row 1: a quote is not closed before the file ends",
        {"documents": {"on_bad": "skip"}},
    ),
    "header that is not CSV": File("a.csv", b'"text"x\na\n', r"^a.csv: the first row, which names the columns, is damaged"),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, file):
    for name, content in {**(file.beside or {}), file.name: file.content}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    refuse(tmp_path, tmp_path / "in", file.words, **(file.settings or {}))


NO_ROWS = {
    # without rows, and with one
    "parquet": (parquet(pa.array([], pa.string())), parquet(pa.array(["a"]))),
    "arrow": (arrow(pa.array([], pa.string())), arrow(pa.array(["a"]))),
    "stream.arrow": (arrow(pa.array([], pa.string()), stream=True), arrow(pa.array(["a"]))),
    "csv": (b"id,text\n", b"text\na\n"),
    "cut.csv": (b"id,text", b"text\na\n"),
    "jsonl": (b"\n", b'{"text": "a"}'),
}


def test_a_file_without_rows_is_valid_alone_and_among_others(tmp_path):
    alone = built(tmp_path, {name: (f"b.{name}", without, {}) for name, (without, _) in NO_ROWS.items()})
    assert alone == dict.fromkeys(NO_ROWS, ([], {}))
    for name, (without, one) in NO_ROWS.items():
        (tmp_path / name).mkdir()
        for number, content in enumerate((without, one, without)):
            (tmp_path / name / f"{number}.{name}").write_bytes(content)
    sources = [{"name": name, "path": str(tmp_path / name)} for name in NO_ROWS]
    result = build_here(settings_of(tmp_path / "all", sources=sources, validation_fraction=0))
    files = [(one.text, one.file) for one in held(result.path)["train"]]
    assert files == [("a", 3 * i + 1) for i in range(len(NO_ROWS))]  # those without rows keep their numbers


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere or in a circle"),
        (lambda path: path.symlink_to(path), "is a link that leads nowhere or in a circle"),
        (os.mkfifo, "is not a plain file"),
    ],
)
def test_what_is_no_plain_file_is_refused_and_never_waited_for(tmp_path, make, words):
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / "b.jsonl").write_bytes(PLAIN)
    make(path := directory / "a.jsonl")
    for place in (directory, path):
        refuse(tmp_path, place, f"the source: {path} {words}")


def test_a_link_to_a_directory_is_refused_not_passed_over(tmp_path):
    """Its files would be lost without a word; or it leads in a circle."""
    (directory := tmp_path / "in").mkdir()
    (directory / "again").symlink_to(directory)
    words = f"{directory}/again is a link to a directory, which is not followed. Remove it, or make {directory} a"
    refuse(tmp_path, directory, words)


def test_a_file_that_changes_during_the_build_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "old"}\n')

    class Meddling(Threads):
        """Changes the file when its digest has been taken and before it is tokenized."""

        def start(self, item: Any, *steps: Step) -> Any:
            if steps[0].stage is TOKENIZE:
                rewrite(path, b'{"text": "new"}\n')
            return super().start(item, *steps)

    refuse(
        tmp_path,
        path,
        r"^a.jsonl changed while the build read it. Run the build again when the file is complete",
        runner=Meddling,
    )
    assert texts_of(run(tmp_path, path)) == ["new"]


BASE = {"output": "$TMP/out", "source": "{path: $TMP/in.jsonl}", "tokenizer": "bytes"}
CONFIGS = {
    # a configuration -> the words. What it does not mention is as above; in $TMP, tokenizer.json is an empty object.
    "tokenizr: bytes": "unknown key 'tokenizr'. Did you mean 'tokenizer'?",
    "zzz: 1": "unknown key 'zzz'. There are documents, ",
    "source: {path: x, text_colum: a}": "unknown key 'source.text_colum'. Did you mean 'text_column'?",
    "text_column: body": "unknown key 'text_column'. Did you mean 'source.text_column'?",
    "revision: main": "unknown key 'revision'. Did you mean 'source.hub.revision' or 'tokenizer.revision'?",
    "source: {path: x, messages: {role: from}}": "the source has messages, which is for messages; give its messages_column, too",
    "source: {path: x, messages_column: m, messages: {role: content}}": "source.messages: role and content are both 'content'",
    "source: {path: x, messages_column: m, messages: {rôle: from}}": "unknown key 'source.messages.rôle'. There are content",
    "source: {path: x, messages_column: m, messages: {role: ''}}": "messages.role: String should have at least 1 character",
    "source: {path: x, tools_column: t}": "has tools_column, which is for messages; give its messages_column, too",
    "source: {path: x, count: [content]}": "has count, which is for messages; give its messages_column, too",
    "source: {path: x, roles: [user]}": "has roles, which is for messages; give its messages_column, too",
    "source: {path: x, messages_column: m, count: [calls]}": "should be 'content', 'tool_calls' or 'thinking', not 'calls'\n",
    "source: {path: x, messages_column: m, tools_column: m}": "messages_column and tools_column are both 'm'",
    "source: {path: x, completion_column: a}": "has a completion_column; give its prompt_column, too",
    "source: {path: x, prompt_column: q}": "has a prompt_column; give its completion_column, too",
    "source: {path: x, prompt_column: q, completion_column: q}": "prompt_column and completion_column are both 'q'",
    "source: {path: x, prompt_column: q, completion_column: a, text_column: t}": "has text_column and prompt_column; give one",
    "source: {path: x, keep_columns: [url, key]}": "source.keep_columns: 'key' is what every document has already",
    "split: {by: cluster}": "split.by is 'cluster', which is neither key nor text, nor a column that a source keeps",
    "documents: {near_duplicates: {action: keep}}\nsource: {path: x, keep_columns: [cluster]}": "gives the column 'cluster'",
    "documents: {steps: [{use: shout}]}": "documents.steps: there is no step 'shout'",
    "documents: {steps: [{use: length, least: 3}]}": "documents.steps: step 'length'",
    "documents: {steps: [{use: datatrove, filter: x, model_url: 'https://u:Tr0ub4dor@x.org/a'}]}": "carries credentials",
    "validation_fraction: 0.9\ntest_fraction: 0.2": "validation_fraction 0.9 and test_fraction 0.2 are more than 1 together",
    "test_fraction: 0.2\nsource: {path: x, validation_split: x}": "so that no document is drawn, but test_fraction is 0.2",
    "slice_bytes: 0": "slice_bytes: should be greater than 0, not 0",
    "workers: 0": "workers: should be greater than or equal to 1, not 0",
    "workers: 2.5": "workers: should be a whole number, not 2.5",
    "validation_fraction: 1.5": "validation_fraction: should be less than or equal to 1, not 1.5",
    "documents: {near_duplicates: {threshold: 0.3}}": "threshold: should be greater than or equal to 0.5, not 0.3",
    "tokenizer: {name: bytes, max_seconds: 0}": "tokenizer.max_seconds: should be greater than or equal to 1, not 0",
    "source: {path: x, keep_columns: [url, url]}": "source.keep_columns: 'url' is named twice",
    "sources: []": "sources: needs at least one item",
    "workers: true": "workers: should be a number, not true",
    "name: 12": "name: should be text, not 12",
    "tokenizer: 5": "'tokenizer' is a name, such as cl100k_base, in quotes if it is a number",
    "documents: skip": "documents: should be a mapping of settings, not 'skip'",
    "sources:": "sources: should be a list, not nothing",
    "validation_fraction: .nan": "validation_fraction: should be a finite number, not nan",
    "layout: zip": "layout: should be 'auto', 'mmap', 'compact' or 'zarr2', not 'zip'",
    "# no output": "output is missing. Set it: Directory or URL, such as /data/web",
    "source: {hub: {path: a/b, revision: 0123456}}": (
        "source.hub.revision: should be text, not 42798. YAML makes that of digits such as 0123456, 1.10 and 2026-07-31: put"
    ),
    "source: {path: x, messages_column: m, chat_date: 2026-07-31}": (
        "source.chat_date: should be text, not the date 2026-07-31. YAML makes that of digits such as"
    ),
    "source: {path: x, no: y}": "a key of source is False. YAML makes that of words such as no and on: put the word in quotes",
    "source: {path: x, delimiter: '||'}": (
        r'source.delimiter: should be one character of ASCII, such as ; or "\t", and no quote'
    ),
    "source: {path: $TMP/in.jsonl, delimiter: ;}": "in.jsonl is jsonl, which has no delimiter. Leave source.delimiter out",
    "source: {path: x}\nsources: [{path: x}]": "there are both 'source' and 'sources'",
    "sources: {path: x}": "'sources' is a list; a single one may be called 'source'",
    "source: x.jsonl": "source: should be a mapping of settings, not 'x.jsonl'",
    "source: {name: a}": "source 'a' has neither of 'path', 'hub' and 'table'; give one",
    "source: {path: x, hub: {path: a/b}}": "the source has more than one of 'path', 'hub' and 'table'; give one",
    "sources: [{name: a, path: x}, {name: a, path: y}]": "two sources are named 'a'; give each a name of its own",
    "validation_fraction: 0.1\nsource: {path: x, validation_split: test}": (
        "names a validation_split, and validation_fraction is 0.1. Remove one of them"
    ),
    "source: {path: https://user:Tr0ub4dor@example.org/x}": (
        "the URL of example.org carries credentials. Parameters are shown in plain text: use ambient credentials"
    ),
    "source: {path: 'https://example.org/x?X-Amz-Signature=Tr0ub4dor'}": (
        "the URL of example.org is signed (X-Amz-Signature). Use ambient credentials instead"
    ),
    "source: {path: zip://a::s3://b/c.zip}": "chained URLs ('::') are not accepted; name the file itself",
    "source: {path: ftp://example.org/x}": "ftp:// is not known here; file, local, http, https, gs",
    "output: abfs://account.dfs.core.windows.net/x": "abfs:// is not followed by a container, perhaps with",
    "output: https://example.org/x": "nothing can be written to http; name a directory or an object store",
    "source: {path: /data/../etc}": "goes down and up again ('..'); write where it leads",
    "output: /dev/null/out": "cannot write to output /dev/null/out: Not a directory. Choose another output",
    "tokenizer: gpt5": "there is no tokenizer 'gpt5'. Set tokenizer to one of gpt2,",
    "tokenizer: /nowhere/x.tiktoken": "cannot read the tokenizer /nowhere/x.tiktoken: No such file",
    "tokenizer: $TMP/tokenizer.json": "is not a tokenizer.json that 'tokenizers'",
}
NO_CONFIGS = {
    "output: [": "is not YAML: ",
    "": "is not a mapping of settings",
    "output: x\nsource:\n  path: y\n  path: z\ntokenizer: bytes\n": (
        "config.yaml: the key 'path' is in line 3 and again in line 4"
    ),
    "[" * 100_000: "is nested too deep",
    "output: !!timestamp today\n": "config.yaml is not YAML: a value does not fit !!timestamp (line 1, column 9)",
    "a: 2026-13-45\n": "config.yaml is not YAML: a value does not fit !!timestamp (line 1, column 4)",
    "output: x\nsource: {path: y\ntokenizer: bytes\n": "is not YAML: expected ',' or '}', but got ':' (line 3, column 10)",
    "output: x\nlayout: !!bool x\n": "config.yaml is not YAML: a value does not fit !!bool (line 2, column 9)",
    "!!python/object/apply:os.system ['touch /tmp/owned']": "is not YAML: could not determine a constructor",
}


@pytest.mark.parametrize("config", [*CONFIGS, *NO_CONFIGS], ids=lambda config: config[:60])
def test_a_mistake_in_the_configuration_is_told_in_one_line(tmp_path, terminal, config):
    """Before any work, by a status that is not 0, without a traceback and without any secret."""
    (tmp_path / "in.jsonl").write_bytes(PLAIN)
    (tmp_path / "tokenizer.json").write_text("{}")
    usual = [] if config in NO_CONFIGS else [f"{key}: {value}" for key, value in BASE.items() if key not in config]
    (tmp_path / "config.yaml").write_text("\n".join([config, *usual]).replace("$TMP", str(tmp_path)))
    status, out, errors = terminal("build", tmp_path / "config.yaml", "--no-server")
    assert (bool(status), out) == (True, "")
    assert errors.startswith("flat-tokens-service build: ")
    assert {**CONFIGS, **NO_CONFIGS}[config] in errors
    assert errors.count("\n") == 1
    assert "Tr0ub4dor" not in errors
    assert not (tmp_path / "out/versions").exists()
