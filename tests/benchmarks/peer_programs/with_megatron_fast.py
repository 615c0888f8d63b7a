"""Megatron's fast preprocess: a file of JSON lines through gigatoken on all cores, all tokens in one array, the end-of-text token
after each document, into an indexed dataset. Written anew after what `tools/preprocess_data_fast.py` of Megatron core 0.19 does,
which the package does not hold. Its `add_documents_parallel` is not in 0.16.1, the newest release on the index: tokens are
written here in one go, and the package's builder writes the index.

    with_megatron_fast.py TEXT.jsonl VOCABULARY_DIRECTORY OUTPUT WORKERS
"""

import os
import sys
from pathlib import Path

import gigatoken
import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

END_OF_TEXT = 50256

if __name__ == "__main__":
    text, vocabulary, output, workers = sys.argv[1:]
    os.environ.setdefault("RAYON_NUM_THREADS", workers)
    os.makedirs(output)
    tokenizer = gigatoken.Tokenizer.from_json(Path(vocabulary, "tokenizer.json").read_bytes())
    documents = tokenizer.encode_files(gigatoken.JsonlFileSource([text], field="text"))
    offsets = np.asarray(documents.layout.offsets.data).astype(np.int64)
    tokens = np.asarray(documents.layout.content.data)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets) + 1
    dtype = DType.optimal_dtype(END_OF_TEXT + 1)
    ended = np.insert(tokens, offsets[1:] - offsets[0], END_OF_TEXT).astype(dtype)
    builder = IndexedDatasetBuilder(f"{output}/tokens.bin", dtype=dtype)
    builder.data_file.write(ended.data)
    builder.sequence_lengths.extend(lengths.tolist())
    builder.document_indices.extend(range(1, len(lengths) + 1))
    builder.finalize(f"{output}/tokens.idx")
