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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


of_thread = threading.local()


def load(ranks: Path, pretokenizer: str) -> None:
    """Give this thread a tokenizer of its own."""
    of_thread.tokenizer = gigatoken.Tokenizer.from_tiktoken(ranks, pretokenizer=pretokenizer, special_tokens={})


def encode(column: pa.StringArray) -> tuple[Any, int]:
    """uint32[tokens], id*2+1 where a token starts a document, id*2 elsewhere, in the tokenizer's own memory; and bytes of text,
    which is not copied.
    """
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    text = ak.contents.NumpyArray(np.frombuffer(column.buffers()[2], np.uint8), parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), text, parameters={"__array__": "string"})
    encoded = of_thread.tokenizer.encode_batch(ak.Array(strings), parallel=False).layout
    tokens, ends = encoded.content.data, np.asarray(encoded.offsets)
    np.left_shift(tokens, 1, out=tokens)
    tokens[ends[:-1][ends[:-1] < ends[1:]]] |= 1
    return tokens, int(offsets[-1] - offsets[0])


def tokenize(span: Span) -> Counter[str]:
    """Write the tokens of one span; hold one batch of its text at a time."""
    counts: Counter[str] = Counter()
    file = pq.ParquetFile(span.path, metadata=span.metadata, pre_buffer=False)
    with open(span.output, "wb") as output:
        for batch in file.iter_batches(span.batch_rows, row_groups=span.row_groups, columns=["text"], use_threads=False):
            tokens, text_bytes = encode(batch.column(0))
            output.write(tokens)
            counts += Counter(text_bytes=text_bytes, documents=len(batch), tokens=len(tokens))
    return counts


if __name__ == "__main__":
    begin = time.perf_counter()
    text, output, name = sys.argv[1:]
    Path(output).mkdir(parents=True)  # rewriting old files is faster
    with tempfile.TemporaryDirectory() as temporary:
        ranks = Path(temporary, f"{name}.tiktoken")  # in tiktoken's own format, which gigatoken reads
        tokens = tiktoken.get_encoding(name)._mergeable_ranks.items()
        ranks.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in tokens))
        with ThreadPoolExecutor(THREADS, initializer=load, initargs=(ranks, PRETOKENIZERS[name])) as threads:
            counts = sum(threads.map(tokenize, plan_spans(Path(text), Path(output))), Counter())
    print(json.dumps({"seconds": time.perf_counter() - begin, **counts}))
