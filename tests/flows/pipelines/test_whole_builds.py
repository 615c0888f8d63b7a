"""Whole builds in one process: what goes in comes out, whatever the number of workers and the size of slices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

import flat_tokens
from tests.examples import first_fast
from tests.tasks.finalize.test_finalize import demo_sources, make


def objects(path: str) -> dict[str, str]:
    return {o["key"]: o["blake3"] for o in json.loads((Path(path) / "manifest.json").read_text())["objects"]}


def test_the_card_says_what_the_dataset_is_made_of_and_the_run_record_alone_when_and_where(tmp_path):
    result = make(tmp_path / "out", sources=demo_sources(), name="cards")
    (record,) = (tmp_path / "out/runs").iterdir()
    assert json.loads(record.read_text())["host"]
    manifest = (Path(result.path) / "manifest.json").read_text()
    assert str(tmp_path) not in manifest
    assert "At " not in manifest
    card = (Path(result.path) / "README.md").read_text()
    for words in ("# cards", "stories.parquet", "notes.jsonl", "`bytes`", "330 read, 330 written", "flat_tokens.open"):
        assert words in card


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "files"), first_fast([("gpt2", 2), ("cl100k_base", 8), ("o200k_base", 2)], 0, several=True, every=3)
)
def test_every_sequence_of_the_corpus_is_tiktokens(tmp_path, corpus, vocabularies, name, files):
    """All 46,132 documents, or those of some files, at 1, 2 and 4 workers: nothing lost, nothing doubled, the same bytes."""
    import tiktoken

    source = tmp_path / "in"
    source.mkdir()
    for path in sorted(corpus.iterdir())[:files]:
        shutil.copy(path, source)
    results = [
        make(tmp_path / str(n), n, source={"path": str(source), "id_column": "id"}, tokenizer=name, slice_bytes=size)
        for n, size in ((1, 128_000_000), (2, 8_000_000), (4, 3_000_000))
    ]
    assert len({json.dumps(objects(result.path)) for result in results}) == 1

    encoding = tiktoken.get_encoding(name)
    texts = [t for path in sorted(source.iterdir()) for t in pq.read_table(path, columns=["text"])["text"].to_pylist()]
    assert results[0].totals["documents"]["written"] == len(texts) > 10_000
    starts = np.cumsum([0] + [pq.read_metadata(path).num_rows for path in sorted(source.iterdir())])
    dataset, seen = flat_tokens.open(results[1].path), np.zeros(len(texts), bool)
    for split_name, split in (("train", dataset.train), ("validation", dataset.validation)):
        beside = {a: zarr.open_array(f"{dataset.path}/documents/{split_name}/{a}", mode="r")[:] for a in ("file", "row")}
        tokens, seq_starts = split.slice(0, split.token_count) >> 1, split.seq_starts.read(0, split.seq_count + 1).astype(int)
        for i, document in enumerate(starts[beside["file"].astype(int)] + beside["row"].astype(int)):
            assert np.array_equal(
                tokens[seq_starts[i] : seq_starts[i + 1]], encoding.encode_to_numpy(texts[document], disallowed_special=())
            )
            seen[document] = True
    assert seen.all()
