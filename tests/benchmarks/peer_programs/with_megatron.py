"""Megatron's preprocess: JSON lines through a pool of processes with `imap(..., 32)`, a document at a time through the fast
tokenizer of transformers, the end-of-text token behind each, into an indexed dataset. Written anew from
`tools/preprocess_data.py`, which the package megatron-core does not hold; the writer of the indexed dataset is the package's own.

    with_megatron.py TEXT.jsonl VOCABULARY_DIRECTORY OUTPUT WORKERS
"""

import json
import multiprocessing
import os
import sys

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import AutoTokenizer

tokenizer = None


def load(vocabulary):
    """Give this worker process its tokenizer."""
    global tokenizer
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)


def encode(line):
    """The ids of one document, the end-of-text token last."""
    ids = tokenizer(json.loads(line)["text"]).input_ids
    return [*ids, tokenizer.eos_token_id] if ids else ids


if __name__ == "__main__":
    text, vocabulary, output, workers = sys.argv[1:]
    os.makedirs(output)
    load(vocabulary)
    builder = IndexedDatasetBuilder(f"{output}/tokens.bin", dtype=DType.optimal_dtype(len(tokenizer)))
    with open(text, encoding="utf-8") as lines, multiprocessing.Pool(int(workers), load, (vocabulary,)) as pool:
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{output}/tokens.idx")
