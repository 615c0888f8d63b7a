"""A whole corpus in one process: what goes in comes out, whatever the number of workers and the size of slices."""

import numpy as np
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens.arrays.opening import open_array
from tests.examples import first_fast
from tests.faults.support import build_here, same_bytes, settings_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "files"), first_fast([("gpt2", 2), ("cl100k_base", 8), ("o200k_base", 2)], 0, several=True, every=3)
)
def test_every_sequence_of_the_corpus_is_tiktokens(tmp_path, corpus, vocabularies, name, files):
    """All 46,132 documents, or those of some files, at 1, 2 and 4 workers: nothing lost, nothing doubled, the same bytes."""
    import tiktoken

    paths = sorted(corpus.iterdir())[:files]
    results = [
        build_here(settings_of(tmp_path / str(n), *paths, slice_bytes=size) | {"tokenizer": name}, n)
        for n, size in ((1, 128_000_000), (2, 8_000_000), (4, 3_000_000))
    ]
    assert same_bytes(*results)

    encoding, seen = tiktoken.get_encoding(name), set()
    texts = [pq.read_table(path, columns=["text"])["text"].to_pylist() for path in paths]
    dataset = flat_tokens.open(results[1].path)
    for split_name, split in dataset.splits.items():
        arrays = (open_array(dataset.store / f"documents/{split_name}/{of}", "uint64") for of in ("file", "row"))
        for i, (file, row) in enumerate(zip(*(array.read(0, split.seq_count).tolist() for array in arrays), strict=True)):
            assert np.array_equal(split.sequence(i), encoding.encode_to_numpy(texts[file][row], disallowed_special=()))
            seen.add((file, row))
    assert len(seen) == results[0].totals["documents"]["written"] == sum(map(len, texts)) > 10_000
