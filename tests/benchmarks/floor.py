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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import awkward as ak
import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

PRETOKENIZERS = {"gpt2": "gpt2", "r50k_base": "r50k", "cl100k_base": "gpt4", "o200k_base": "o200k"}
THREADS = 2
# Chosen by measurement: 2 MB costs encoding speed; 8 and 16 MB cost fresh memory pages, in Arrow and in the tokenizer.
BATCH_TEXT_BYTES = 4_000_000


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


def tokenize(path: Path, output: Path) -> Counter[str]:
    """Write the tokens of one file; hold one batch of its text at a time."""
    counts: Counter[str] = Counter()
    file = pq.ParquetFile(path, pre_buffer=False)
    column, groups = file.metadata.schema.names.index("text"), map(file.metadata.row_group, range(file.num_row_groups))
    size = sum(group.column(column).total_uncompressed_size for group in groups)
    rows = max(1, file.metadata.num_rows * BATCH_TEXT_BYTES // max(1, size))
    with open(output / f"{path.stem}.u32", "wb") as written:
        for batch in file.iter_batches(rows, columns=["text"], use_threads=False):
            tokens, text_bytes = encode(batch.column(0))
            written.write(tokens)
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
            counts = sum(threads.map(partial(tokenize, output=Path(output)), sorted(Path(text).glob("*.parquet"))), Counter())
    print(json.dumps({"seconds": time.perf_counter() - begin, **counts}))
