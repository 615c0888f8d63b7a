"""The targets: what reads bytes that may come from strangers, or from a damaged disk."""

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import random
import shutil
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from blake3 import blake3

import flat_tokens
from flat_tokens.formats import FORMATS, open_any
from flat_tokens.manifest import SPLITS, pointer_digest
from flat_tokens.pages import pages_of
from flat_tokens.stores.store import Store
from flat_tokens.tools.corpus import open_corpus, run_of
from flat_tokens.vocabulary import load_vocabulary
from flows.commands.build import read_config
from tasks.config import DocumentPolicy, Source
from tasks.derive.inputs import examine
from tasks.download.cut import cut_files, look_into
from tasks.download.slices import slices_of
from tasks.download.sources import resolve_source
from tasks.download.table import MAGIC, CutFile, known_files, remember_files
from tasks.garbage import Policy, collect
from tasks.groups import put_group, read_group, read_report
from tasks.models import digest_of
from tasks.output.leases import Workspace, in_use
from tasks.output.pointer import read_pointer
from tasks.output.versions import list_versions, pin, read_origin
from tasks.shards.receipts import load_shard
from tasks.text.documents import Tally, read_documents
from tests.damage import change_file
from tests.faults.support import build_here, settings_of, shards_stay, write_notes
from tests.flat_tokens.test_reader import WAYS, plain
from tests.fuzz.driver import Fuzzed, Mutator, Prepare, WrongError, each, of_file, portable
from tests.fuzz.mutated_datasets import DATASETS
from tests.fuzz.mutators import NUMBERS, OPCODES, either, havoc, json_values, parquet
from tests.fuzz.strangers import STRANGERS
from tests.made import write_sequences
from tests.sources import as_archive, as_record, parquet_bytes, tar_bytes, write_arrow
from tests.tasks.test_groups import group

LARGE_TEXT = 64 << 20
"""Bytes of text, and four times the tokens, that no input here can stand for: inputs have some kB."""


NUMERIC = havoc(*NUMBERS)

# Source files


def source(file: str, seeds: Callable[[], list[bytes]], mutate: Any, **settings: Any) -> Prepare:
    """A source file, found, unpacked, cut into slices and read as a build does it, under each policy for bad documents."""

    def prepare(work: Path) -> Fuzzed:
        path = work / "in" / file
        path.parent.mkdir()
        chosen = Source(name="one", path=str(path.parent), **settings)
        place = Workspace(Store.at(work / "out"), str(work / "staging"), str(work / "scratch"))

        def read(on_bad: str, cut_of: Callable[..., CutFile]) -> None:
            (found,) = resolve_source(chosen, 0).files
            text_bytes = 0
            for part in slices_of([cut_of(found, (chosen,), 1000, place)], 1000):
                policy = DocumentPolicy.model_validate({"on_bad": on_bad, "max_bytes": 1 << 20})
                for documents in read_documents(part, chosen, policy, Tally()):
                    text_bytes += documents.texts.nbytes
                    if text_bytes > LARGE_TEXT:
                        raise WrongError("large", f"{path.stat().st_size} bytes stand for more than {text_bytes:,} bytes of text")

        def run(data: bytes) -> None:
            path.write_bytes(data)
            for left in (work / "scratch/files").glob("*"):
                left.unlink()
            in_memory = lambda found, *shared: cut_files((found,), *shared)[0]  # noqa: E731  as small files are cut
            ways = {"error": look_into, "skip": in_memory, "replace": look_into}
            each((file,), *(partial(read, on_bad, cut_of) for on_bad, cut_of in ways.items()))

        return Fuzzed(seeds(), mutate, run, (file,))

    return prepare


TEXTS = [None if i % 7 == 5 else f"text {i} " * (i % 4) for i in range(24)]


_parquet_file = partial(parquet_bytes, store_schema=False)


def parquet_seeds() -> list[bytes]:
    texts = pa.array(TEXTS, pa.string())
    table = pa.table({"text": texts, "id": pa.array(range(len(TEXTS)), pa.int64())})
    named = pa.table({"id": pa.array([f"id-{i}" for i in range(24)]), "text": texts})
    pages = {"row_group_size": 12, "data_page_size": 40, "write_batch_size": 4}
    return [
        _parquet_file(table, compression="none", **pages),
        _parquet_file(table, compression="snappy", use_dictionary=False, write_page_checksum=True, **pages),
        _parquet_file(named, compression="zstd", data_page_version="2.0", **pages),
        _parquet_file(table, compression="none", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}),
        _parquet_file(pa.table({"text": pa.array(["a" * 900] * 50), "id": pa.array([None] * 50, pa.string())})),
    ]


def arrow_seeds() -> list[bytes]:
    texts = pa.array(TEXTS, pa.string())
    ids = pa.array([f"id-{i}" for i in range(24)])
    kinds = (texts, texts.cast(pa.large_string()), texts.dictionary_encode(), texts.cast(pa.string_view()))
    tables = [pa.table({"text": values, "id": ids}) for values in kinds]
    found = []
    for table, stream in itertools.product(tables, (False, True)):
        write_arrow(sink := io.BytesIO(), table, 9, stream=stream)
        found.append(sink.getvalue())
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, tables[0].schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(tables[0])
    return [*found, sink.getvalue()]


def jsonl_seeds() -> list[bytes]:
    lines = [{"id": i, "text": text, "more": {"a": [i, None, 1.5]}} for i, text in enumerate(TEXTS)]
    named = [{"text": f"é {i} \U0001f600", "id": f"id {i}"} for i in range(5)]
    return [
        b"\n".join(json.dumps(line).encode() for line in chosen) + end
        for chosen, end in ((lines, b"\n"), (named, b""), (lines[:2], b"\r\n"), ([{"text": "a", "id": 1}], b"\n\n"))
    ]


CSV_SEEDS = [
    b"id,text\n1,one\n2,two\n3,\n",
    b'\xef\xbb\xbf"text","id"\r\n"a ""quoted"" text,\nin two lines","1"\r\n"b","2"\r\n',
    b'more,text,id\n,"",\n"x",' + "é".encode() * 50 + b",7\n",
]
CSV_WORDS = (
    b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"\t", b"x" * 10_000, b"text", b"id",
    b'",\n"',
)  # fmt: skip
JSON_WORDS = (
    b"null", b"{", b"}", b"[", b"]", b'"', b"\\ud800", b'"\\ud800":1,', b"\\u0000", b"\0", b"\xff", b"\n", b"\r\n",
    b":", b",", b'{"text":"a"}', b"NaN", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 20_000, b"\xef\xbb\xbf",
    b'"text":', b"true",
)  # fmt: skip


def packed_seeds() -> list[bytes]:
    text = jsonl_seeds()[0]
    zstd = zstandard.ZstdCompressor(write_checksum=True).compress(text)
    two = gzip.compress(text[:50]) + gzip.compress(text[50:])
    return [gzip.compress(text), zstd, bz2.compress(text), lzma.compress(text), two]


def tar_seeds() -> list[bytes]:
    rows = [{"id": f"{i}", "text": f"text {i} " * i} for i in range(8)]
    long = tar_bytes([("long/" * 30 + "name.txt", b"abc")], tarfile.GNU_FORMAT)
    return [as_archive(rows, 2), as_archive(rows[:2], 1), long]


def warc_seeds() -> list[bytes]:
    page = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=gb2312\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n<p>\r\n0\r\n\r\n"
    )
    packed = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"<p>a")
    responses = b"".join(
        b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: %d\r\n\r\n%b\r\n\r\n" % (len(one), one) for one in (page, packed)
    )
    rows = [{"id": f"<urn:{i}>", "text": f"text {i} " * i, "url": f"http://x/{i}"} for i in range(6)]
    return [b"".join(map(as_record, rows)), responses + as_record(rows[1])]


WARC_WORDS = (
    b"\r\n\r\n",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 0",
    b"WARC/1.0\r\n",
    b"charset=utf-16",
    b"br",
    b"ffffffffffffffff\r\n",
    b"deflate, gzip",
    b"\n\n",
)


def _pieces(work: Path) -> Fuzzed:
    """A model of SentencePiece as tools read it, who have no package for it."""
    path = work / "x.model"
    seed = b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02\x0a\x0a\x0a\x06<0x41>\x18\x06\x12\x02\x18\x02" * 3

    def read() -> None:
        vocabulary = load_vocabulary(str(path))
        vocabulary.decode(np.arange(vocabulary.size + 2, dtype=np.uint32))

    return of_file(path, havoc(*NUMBERS, b"\x0a", b"\x80\x80\x80"), read, seeds=[seed])


# Neighbours' formats: files of tokens


SEQUENCES = [[1, 2], [3, 4, 5], [], [6, 7, 300], list(range(40))]


def neighbour(format: str, mutated: str, mutate: Mutator = NUMERIC, **options: Any) -> Prepare:
    """A directory in a neighbour's format, one file of which is mutated; recognised, opened and read in every way."""
    chosen = FORMATS[format]
    settings = chosen.options(**options)

    def prepare(work: Path) -> Fuzzed:
        dataset, store = flat_tokens.open(write_sequences(work / "origin", SEQUENCES, SEQUENCES[:2])), Store.at(work / "data")
        splits = {"train": dataset.train, "validation": dataset.validation}
        written = [stored for part in chosen.plan(splits, settings) for stored in chosen.write(splits, part, store, settings)]
        chosen.finish(splits, written, store, settings)
        path = work / "data" / mutated

        def read(*given: Any) -> None:
            for split in open_any(work / "data", *given).splits.values():
                tokens = 0
                for batch in split.batches():
                    tokens += batch.token_count
                    if tokens * 4 > LARGE_TEXT:
                        raise WrongError("large", f"{path.stat().st_size} bytes stand for more than {tokens:,} tokens")
                if tokens != split.token_count:
                    raise WrongError("count", f"{tokens} tokens in batches, but token_count is {split.token_count}")
                if split.seq_count:
                    split.sequence(0)
                    split.sequence(-1)

        return of_file(path, mutate, read, lambda: read(format, settings), names=(str(work),))

    return prepare


def _mds_shard(work: Path) -> Fuzzed:
    """The index says of the mutated shard the size that it has."""
    fuzzed = neighbour("mds", "train/shard.00000.mds")(work)

    def run(data: bytes) -> None:
        change_file(work / "data/train/index.json", {"shards": {0: {"raw_data": {"bytes": len(data)}}}})
        fuzzed.run(data)

    return fuzzed._replace(run=run)


def _pages(work: Path) -> Fuzzed:
    """The pages of a column chunk, from its first header on."""
    return Fuzzed(
        [data[4:] for data in parquet_seeds()],
        parquet,
        lambda data: list(pages_of(io.BytesIO(data), 0, 12)),
        ("",),  # its errors are for its caller, which knows the file
    )


# What lies at an output


def _built(work: Path) -> tuple[Path, Store]:
    """An output with two versions, token shards, records of runs and origins, and a pin."""
    notes, output = write_notes(work / "in/notes.jsonl", 12), work / "out"
    for seed in (0, 1):
        with shards_stay():
            build_here(settings_of(output, notes, split_seed=seed), 1)
    root = Store.at(output)
    pin(root, str(read_pointer(root).version), "kept")
    return output, root


def _resealed(value: Any) -> Any:
    """A value whose ``sha256`` is the digest of the rest. What has no digest, such as lone surrogates, stays as it is."""
    if isinstance(value, dict):
        with contextlib.suppress(ValueError, RecursionError):
            return {**value, "sha256": digest_of({name: one for name, one in value.items() if name != "sha256"})}
    return value


ANY_JSON = either(json_values(), json_values(), havoc(*JSON_WORDS))
SEALED = either(json_values(_resealed), json_values(_resealed), havoc(*JSON_WORDS))


def _pointer(work: Path) -> Fuzzed:
    output, root = _built(work)
    path = output / "latest.json"
    former = [version.version for version in list_versions(root)][1:]
    moved = {**json.loads(path.read_bytes()), "withdrawn": [{"version": former[0], "until": "2026-01-01T00:00:00+00:00"}]}
    moved["sha256"] = pointer_digest(moved)

    def agree() -> None:
        try:
            flat_tokens.verify(output, "full")
        except (ValueError, FileNotFoundError):
            return
        try:
            read_pointer(root)
        except ValueError as error:
            raise WrongError("verify-passes", f"verify finds no fault, but builds stop: {error}") from error

    readers = (flat_tokens.open, partial(flat_tokens.verify, level="full"), open_corpus)
    calls = [
        agree,
        *(partial(read, output) for read in readers),
        *(partial(read, root) for read in (read_pointer, list_versions)),
    ]
    mutate = either(json_values(), json_values(), havoc(*JSON_WORDS, former[0].encode()))
    seeds = [path.read_bytes(), json.dumps(moved).encode()]
    words = {name.encode(): word for name, word in ((former[0], b"FORMER"), (moved["version"], b"LATEST"))}
    words[moved["manifest_sha256"].encode()] = b"DIGEST"
    return portable(of_file(path, mutate, *calls, seeds=seeds, names=(str(output),)), words)


def _manifest(work: Path) -> Fuzzed:
    output, root = _built(work)
    version = output / "versions" / str(read_pointer(root).version)

    def look() -> None:
        corpus = open_corpus(version)
        _ = corpus.sources, corpus.tokenizer
        for name in SPLITS:
            corpus.documents(name)

    return of_file(
        version / "manifest.json",
        ANY_JSON,
        lambda: flat_tokens.verify(version, "full"),
        lambda: flat_tokens.open(version).manifest,
        look,
        lambda: list_versions(root),
        lambda: collect(root, Policy(grace_days=0)),
        lambda: examine(str(version)),
        names=(str(output),),
    )


def _receipt(work: Path) -> Fuzzed:
    output, root = _built(work)
    (key,) = (path.parent.name for path in output.glob("_cache/*/receipt.json"))
    shard = output / "_cache" / key
    whole = shutil.copytree(shard, work / "whole")

    def run(data: bytes) -> None:
        shutil.copytree(whole, shard, dirs_exist_ok=True)
        (shard / "receipt.json").write_bytes(data)
        try:
            each((str(output),), lambda: open_corpus(shard), lambda: collect(root, Policy(grace_days=0)))
        finally:
            load_shard(root, key)  # which raises nothing: a damaged shard is moved aside
            shutil.rmtree(output / "_quarantine", ignore_errors=True)

    return Fuzzed([(whole / "receipt.json").read_bytes()], SEALED, run, (str(output),))


def _group(work: Path) -> Fuzzed:
    root = Store.at(work / "out")
    digest = put_group(root, group(work))
    path = Path(root.path(f"_groups/{digest}/group.json"))
    seed = path.read_bytes()

    def run(data: bytes) -> None:
        name = digest
        with contextlib.suppress(ValueError, RecursionError):
            name = digest_of(json.loads(data))  # it is where its content says
        other = Path(root.path(f"_groups/{name}/group.json"))
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(data)
        try:
            found = read_group(root, name)
            _ = found.digest, found.stage, found.label
        finally:
            if name != digest:
                shutil.rmtree(other.parent)

    return portable(Fuzzed([seed], ANY_JSON, run, (str(work / "out"), "the build ")), {str(work).encode(): b"WORK"})


def _report(work: Path) -> Fuzzed:
    """A report that cannot be trusted is none: reading it never fails."""
    root, path = Store.at(work / "out"), work / "out/_groups/0/run.json"
    path.parent.mkdir(parents=True)
    fault = {"kind": "ValueError", "message": "a", "may_pass": False}
    facts = {"host": "here", "process": 1, "number": 2, "done": {"documents": 1}, "under_way": ["a"], "fault": fault}
    seed = json.dumps(_resealed({**facts, "results": [{"a": 1}]})).encode()

    def read() -> None:
        try:
            read_report(root, "0", "run")
        except Exception as error:
            raise WrongError(f"report-{type(error).__name__}", str(error)) from error

    return of_file(path, SEALED, read, seeds=[seed])


def _records(work: Path) -> Fuzzed:
    """Records beside versions: a line with the name, then the content. What cannot be read is as if it were not there."""
    output, root = _built(work)
    version = str(read_pointer(root).version)
    chosen = Source(name="one", path=str(work / "in"), id_column="id")
    (found,) = resolve_source(chosen, 0).files
    found = found._replace(immutable="ETag:1")
    place = Workspace(root, str(work / "staging"), str(work / "scratch"))
    remember_files(root, (chosen,), 1000, cut_files((found,), (chosen,), 1000, place), 0)
    lease = output / "_running/build-0"
    lease.parent.mkdir(exist_ok=True)
    lease.write_text(json.dumps({"at": "2026-01-01T00:00:00+00:00", "host": "here"}))
    note = output / "_cache/files" / f"{'0' * 64}.json"
    note.write_text(json.dumps({"uri": "https://a/b", "sha256": "0" * 64}))
    names = {
        b"files": next((output / "_cache/files").glob("*.table")),
        b"origin": output / f"origins/{version}.json",
        b"run": next((output / "runs").glob(f"*-{version}.json")),
        b"lease": lease,
        b"note": note,
    }

    def mutate(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        name, _, content = data.partition(b"\n")
        content = ANY_JSON(chance, content, [other.partition(b"\n")[2] for other in pool])
        if content.startswith(MAGIC) and chance.random() < 0.7:
            body = content[len(MAGIC) + 32 :]
            content = MAGIC + blake3(body).digest() + body
        return name + b"\n" + content

    calls = (
        lambda: known_files([found], (chosen,), 1000, [root]),
        lambda: read_origin(root, version),
        lambda: run_of(open_corpus(output)),
        lambda: list_versions(root),
        lambda: in_use(root),
        lambda: collect(root, Policy(grace_days=0)),
    )

    def run(data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        if (path := names.get(name)) is None:
            return
        whole = path.read_bytes()
        path.write_bytes(content)
        try:
            each((str(output),), *calls)
        finally:
            path.write_bytes(whole)

    seeds = [name + b"\n" + path.read_bytes() for name, path in names.items()]
    return portable(Fuzzed(seeds, mutate, run, (str(output),)), {str(work).encode(): b"WORK", version.encode(): b"LATEST"})


def _zarr(work: Path) -> Fuzzed:
    """The metadata of an array of another writer, with a filter."""
    plain(work / "data", **WAYS["v2 delta"])

    def read() -> None:
        train = flat_tokens.open(work / "data").train
        if max(train.token_count * 4, train.seq_count * 8) <= LARGE_TEXT:  # absent chunks stand for any number of tokens
            list(train.batches())

    calls = read, lambda: flat_tokens.verify(work / "data")
    return of_file(work / "data/train/seq_starts/.zarray", ANY_JSON, *calls, names=(str(work),))


# Configuration

YAML_SEEDS = [
    b"output: out\ntokenizer: bytes\nsource:\n  path: in/*.jsonl\n  text_column: text\n",
    b"""output: /data/out
name: web
sources:
  - &one {name: one, path: 'https://example.org/a.parquet', id_column: id}
  - <<: *one
    name: two
    path: s3://bucket/b
tokenizer: {name: cl100k_base, engine: reference}
documents: {on_bad: skip, empty: keep, max_bytes: 1_000_000}
validation_fraction: 0.01
split_seed: 0x10
layout: compact
slice_bytes: 1000000
workers: 4
runner: groups
groups:
  slices: 12
""",
]
YAML_WORDS = (
    b"&a [*a]", b"&a {a: *a}", b"*one", b"!!python/object/apply:os.system [a]", b"!!binary aGk=", b"!!set {a}",
    b"? [a]\n: b", b"!!timestamp 2026-01-01", b"<<: *one\n", b"\n", b"\t", b"  ", b"- ", b": ", b"{", b"[", b"|\n",
    b">\n", b"'", b'"', b"%YAML", b"---\n", b"...\n", b".inf", b".nan", b"1e400", b"9" * 5000, b"0o7", b"~", b"\xff",
    b"\0", b"\xef\xbb\xbf", b"\\ud800", b"@a", b"!!int x", b"!!float y", b"2026-13-45", b"12:30:45", b"[" * 2000,
    b"{a: " * 2000, b"!<x>", b"&" * 30, b"!!str", b"!!bool x",
)  # fmt: skip


def _yaml(work: Path) -> Fuzzed:
    path = work / "config.yaml"
    laughs = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (i, i, i - 1, i - 1) for i in range(ord("b"), ord("h")))
    mutate = havoc(*YAML_WORDS, laughs, *YAML_SEEDS[1].splitlines(keepends=True))
    return of_file(path, mutate, lambda: read_config(path, []), seeds=YAML_SEEDS)


NPY_WORDS = (b"'<u4'", b"'>u2'", b"'shape': (", b"999999999999999999,)", b"\x93NUMPY\x03\x00", b"True", b"'<f8'")
TARGETS: dict[str, Prepare] = {
    "parquet": source("mutated.parquet", parquet_seeds, either(parquet, NUMERIC), id_column="id"),
    "pages": _pages,
    "arrow": source("mutated.arrow", arrow_seeds, NUMERIC, id_column="id"),
    "jsonl": source("mutated.jsonl", jsonl_seeds, either(json_values(lines=True), havoc(*JSON_WORDS)), id_column="id"),
    "csv": source("mutated.csv", lambda: CSV_SEEDS, havoc(*CSV_WORDS), id_column="id"),
    "packed": source("mutated.jsonl", packed_seeds, havoc()),
    "tar": source("mutated.tar", tar_seeds, havoc(b"ustar", b"\0" * 512, *JSON_WORDS[:4]), id_column="key"),
    "warc": source("mutated.warc", warc_seeds, havoc(*WARC_WORDS), keep_columns=["url", "charset"]),
    "pieces": _pieces,
    "text": source("mutated.txt", lambda: [b"one\n\ntwo\n\nthree", b"---" * 20], havoc(b"---", b"\n\n"), document_separator="--"),
    "manifest": _manifest,
    "pointer": _pointer,
    "receipts": _receipt,
    "groups": _group,
    "reports": _report,
    "records": _records,
    "zarr": _zarr,
    "yaml": _yaml,
    "pickled": neighbour("modalities", "train.pbin", havoc(*OPCODES, *NUMBERS), end_of_text=500),
    "mds-index": neighbour("mds", "train/index.json", ANY_JSON),
    "mds-shard": _mds_shard,
    "nanogpt": neighbour("nanogpt", "train.bin", havoc(), end_of_text=500),
    "npy": neighbour("build-nanogpt", "edufineweb_train_000001.npy", havoc(*NPY_WORDS), end_of_text=500),
    "llm.c": neighbour("llm.c", "edufineweb_train_000001.bin", end_of_text=500),
    "megatron": neighbour("megatron", "train.idx", end_of_text=500),
    "datatrove": neighbour("datatrove", "train/00000_train.ds.index", end_of_text=500),
    "olmo-core": neighbour("olmo-core", "train/part-00000.csv.gz", end_of_text=500),
    "litdata-index": neighbour("litdata", "train/index.json", ANY_JSON),
    "litdata": neighbour("litdata", "train/chunk-0-0.bin"),
    "parquet-lists": neighbour("parquet", "train-00000-of-00001.parquet", parquet),
    "arrow-lists": neighbour("arrow", "train/data-00000-of-00001.arrow"),
    **DATASETS,
    **STRANGERS,
}
