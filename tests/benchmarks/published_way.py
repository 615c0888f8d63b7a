"""The published way: how build-nanogpt's fineweb.py and Jaxformer's uint32 variant of it make token shards.

Measured: rows as Python dicts out of Parquet, a pool of a process a core with tiktoken and `imap(chunksize=16)`, one
numpy array per document pickled back, a preallocated buffer of 100 M tokens, `np.save` whenever it is full. Written
anew from that recipe, and fairly: only the text column is read, in batches, and the shards are uint32 as our own
tokens are. Every document begins with the end-of-text token, so tokens = our tokens + documents.

    published_way.py TEXT_DIRECTORY OUTPUT TOKENIZER
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import tiktoken

SHARD_TOKENS = 100_000_000
BATCH_ROWS = 1000
CHUNK_DOCUMENTS = 16

encoding: tiktoken.Encoding


def rows_of(input_dir: Path) -> Iterator[dict[str, str]]:
    """The rows of a directory of Parquet files as dicts, as the `datasets` library hands them out."""
    for path in sorted(input_dir.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=["text"]):
            yield from batch.to_pylist()


def load_encoding(name: str) -> None:
    """Give this worker process its tokenizer."""
    global encoding
    encoding = tiktoken.get_encoding(name)


def tokenize(row: dict[str, str]) -> np.ndarray:
    """uint32[tokens] of one document, the end-of-text token first."""
    tokens = [encoding.eot_token]
    tokens.extend(encoding.encode_ordinary(row["text"]))
    return np.array(tokens, dtype=np.uint32)


def save_shard(output_dir: Path, index: int, tokens: np.ndarray) -> None:
    split = "val" if index == 0 else "train"
    np.save(output_dir / f"{split}_{index:06d}.npy", tokens)


def write_shards(documents: Iterable[np.ndarray], output_dir: Path) -> None:
    """Cut the stream of documents into shards of `SHARD_TOKENS`, the last one shorter."""
    shard = np.empty(SHARD_TOKENS, dtype=np.uint32)
    filled = shard_index = 0
    for tokens in documents:
        while len(tokens) > SHARD_TOKENS - filled:
            room = SHARD_TOKENS - filled
            shard[filled:] = tokens[:room]
            save_shard(output_dir, shard_index, shard)
            tokens, filled, shard_index = tokens[room:], 0, shard_index + 1
        shard[filled : filled + len(tokens)] = tokens
        filled += len(tokens)
    if filled:
        save_shard(output_dir, shard_index, shard[:filled])


if __name__ == "__main__":
    text, output, name = sys.argv[1:]
    Path(output).mkdir(parents=True)
    with multiprocessing.Pool(os.cpu_count(), initializer=load_encoding, initargs=(name,)) as pool:
        write_shards(pool.imap(tokenize, rows_of(Path(text)), chunksize=CHUNK_DOCUMENTS), Path(output))
        pool.close()
        pool.join()
