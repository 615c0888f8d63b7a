"""The floor: text in Parquet to flat tokens on disk with nothing in between, in one process.

Measured: the ranks file, a tokenizer a thread, reading and decoding the Parquet files, encoding, marking the starts of
sequences, plain writes of the raw uint32 tokens to new files. Left out on purpose: everything that makes a dataset
(fsync, checksums, receipts, splits, zarr metadata). A build cannot be faster; the ratio to this is what it costs.

    floor.py TEXT_DIRECTORY OUTPUT TOKENIZER
"""

import base64
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import awkward as ak
import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

PRETOKENIZERS = {"gpt2": "gpt2", "r50k_base": "r50k", "cl100k_base": "gpt4", "o200k_base": "o200k"}
THREADS = 2
SPAN_TEXT_BYTES = 128_000_000
# Chosen by measurement: 2 MB costs encoding speed; 8 and 16 MB cost fresh memory pages, in Arrow and in the tokenizer.
BATCH_TEXT_BYTES = 4_000_000


class Span(NamedTuple):
    """Consecutive row groups of one file: the work of one thread at a time, and one output file."""

    path: Path
    metadata: pq.FileMetaData
    row_groups: list[int]
    batch_rows: int
    output: Path


def plan_spans(input_dir: Path, output_dir: Path) -> Iterator[Span]:
    """Every file in spans of equal numbers of row groups, about `SPAN_TEXT_BYTES` of text each."""
    for path in sorted(input_dir.glob("*.parquet")):
        metadata = pq.read_metadata(path)
        column, groups = metadata.schema.names.index("text"), map(metadata.row_group, range(metadata.num_row_groups))
        text_bytes = sum(group.column(column).total_uncompressed_size for group in groups)
        span_count = max(1, round(text_bytes / SPAN_TEXT_BYTES))
        batch_rows = max(1, metadata.num_rows * BATCH_TEXT_BYTES // max(1, text_bytes))
        for index, row_groups in enumerate(np.array_split(np.arange(metadata.num_row_groups), span_count)):
            output = output_dir / f"{path.stem}-{index:05d}.u32"
            yield Span(path, metadata, row_groups.tolist(), batch_rows, output)


def write_ranks(encoding: tiktoken.Encoding, path: Path) -> None:
    """Write the vocabulary in tiktoken's own file format, which gigatoken reads."""
    with open(path, "wb") as file:
        ranks = encoding._mergeable_ranks.items()
        file.writelines(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks)


def text_offsets(column: pa.StringArray) -> np.ndarray:
    """int64[documents + 1]: where each document begins and ends in the column's text buffer."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    return offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)


def as_awkward(column: pa.StringArray, offsets: np.ndarray) -> ak.Array:
    """The column as the string array that gigatoken takes; the text itself is not copied."""
    text = np.frombuffer(column.buffers()[2], np.uint8)
    characters = ak.contents.NumpyArray(text, parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), characters, parameters={"__array__": "string"})
    return ak.Array(strings)


def encode(tokenizer: gigatoken.Tokenizer, documents: ak.Array) -> Any:
    """uint32[tokens]: id*2+1 where a token starts a document, id*2 elsewhere, in the tokenizer's own memory."""
    encoded = tokenizer.encode_batch(documents, parallel=False).layout
    tokens, offsets = encoded.content.data, np.asarray(encoded.offsets)
    np.left_shift(tokens, 1, out=tokens)
    starts = offsets[:-1]
    tokens[starts[starts < offsets[1:]]] |= 1
    return tokens


def tokenize_span(tokenizer: gigatoken.Tokenizer, span: Span) -> Counter[str]:
    """Write the tokens of one span; hold one batch of its text at a time."""
    counts: Counter[str] = Counter()
    file = pq.ParquetFile(span.path, metadata=span.metadata, pre_buffer=False)
    batches = file.iter_batches(span.batch_rows, row_groups=span.row_groups, columns=["text"], use_threads=False)
    with open(span.output, "wb") as output:
        for batch in batches:
            column = batch.column(0)
            offsets = text_offsets(column)
            tokens = encode(tokenizer, as_awkward(column, offsets))
            output.write(tokens)
            counts += Counter(text_bytes=int(offsets[-1] - offsets[0]), documents=len(column), tokens=len(tokens))
    return counts


def work(ranks: Path, pretokenizer: str, spans: SimpleQueue[Span]) -> Counter[str]:
    """One thread: load a tokenizer of its own, then take spans until none is left."""
    tokenizer = gigatoken.Tokenizer.from_tiktoken(ranks, pretokenizer=pretokenizer, special_tokens={})
    counts: Counter[str] = Counter()
    while True:
        try:
            counts += tokenize_span(tokenizer, spans.get_nowait())
        except Empty:
            return counts


def tokenize(input_dir: Path, output_dir: Path, tokenizer_name: str) -> Counter[str]:
    """Tokenize every Parquet file of `input_dir` into raw token files below `output_dir`."""
    spans: SimpleQueue[Span] = SimpleQueue()
    for span in plan_spans(input_dir, output_dir):
        spans.put(span)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(THREADS) as threads:
        ranks = Path(temporary) / f"{tokenizer_name}.tiktoken"
        write_ranks(tiktoken.get_encoding(tokenizer_name), ranks)
        pretokenizer = PRETOKENIZERS[tokenizer_name]
        futures = [threads.submit(work, ranks, pretokenizer, spans) for _ in range(THREADS)]
        return sum((future.result() for future in futures), Counter())


if __name__ == "__main__":
    begin = time.perf_counter()
    text, output, name = sys.argv[1:]
    Path(output).mkdir(parents=True)  # rewriting old files is faster
    counts = tokenize(Path(text), Path(output), name)
    print(json.dumps({"seconds": time.perf_counter() - begin, **counts}))
