"""Datasets with a loss mask in other formats: labels where the format has a place for them, and said where it has none."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens.formats import FORMATS, open_any
from flat_tokens.formats.parquet import Parquet
from flat_tokens.tools.export import import_dataset
from tests.flat_tokens.tools.test_export import export as exported
from tests.made import docs_of, publish_docs, write_sequences
from tests.refusal import refusal

SEQUENCES = [[5, 6, 7], [], [8], [9, 10]]
MASK = [0, 1, 1, 0, 1, 0]
LABELS = [[-100, 6, 7], [], [-100], [9, -100]]


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    batch = flat_tokens.TokenBatch.from_sequences(SEQUENCES)._replace(loss_mask=np.array(MASK, np.uint8))
    flat_tokens.write_dataset(tmp_path / "masked", [batch])
    return tmp_path / "masked"


@pytest.mark.parametrize(
    ("format", "options", "read"),
    [
        ("parquet", {"tokens_per_row_group": 3}, pq.read_table),
        ("arrow", {"tokens_per_batch": 3}, lambda out: pa.ipc.open_stream(next(out.glob("train/*.arrow"))).read_all()),
    ],
)
def test_rows_have_labels(masked, tmp_path, format, options, read):
    """Next to the tokens, -100 where they do not count, however the rows come in groups."""
    done = exported(masked, tmp_path / "out", format, **options)
    assert read(tmp_path / "out").to_pydict() == {"input_ids": SEQUENCES, "labels": LABELS}
    assert not done.loses_loss_mask


def test_a_mask_that_would_be_lost_is_told(masked, tmp_path, tool):
    """In words and in JSON, also when there is nothing left to do."""
    told = ["export", masked, tmp_path / "out", "--to", "megatron"]
    assert "the loss mask is not exported: megatron has no place for it" in tool.out(*told)
    assert tool.json(*told)["loses_loss_mask"] is True


def test_the_column_of_labels_is_taken(masked, tmp_path):
    with refusal("column is 'labels', but that is the column of the loss mask"):
        exported(masked, tmp_path / "out", "parquet", column="labels")


# Labels of files


def content(dataset: Path) -> dict[str, Any]:
    """Sequences and masks of the splits."""
    found = {}
    for name in ("train", "validation"):
        split = getattr(flat_tokens.open(dataset), name)
        mask = None if split.loss_mask is None else split.mask(0, split.token_count).tolist()
        found[name] = ([split[i].tolist() for i in range(split.seq_count)], mask)
    return found


@pytest.mark.parametrize("masked_validation", [True, False])
@pytest.mark.parametrize(
    ("format", "files", "options"),
    [
        ("parquet", "*.parquet", {}),
        ("arrow", "*.arrow", {}),
        ("datatrove", "*.loss", {}),
        ("datatrove", "*.loss", {"end_of_text": 7}),
        ("olmo-core", "*.label_mask", {}),
        ("olmo-core", "*.label_mask", {"end_of_text": 7}),
    ],
)
def test_a_mask_survives_a_round_trip(tmp_path, monkeypatch, format, files, options, masked_validation):
    """Of many sequences, some longer than a batch and some empty, in several files; each split has it or not."""
    assert FORMATS[format].keeps_loss_mask
    monkeypatch.setattr("flat_tokens.formats.contract.BATCH_TOKENS", 50)
    rng = np.random.default_rng(0)
    lengths = (*rng.integers(0, 9, 300), 0, 0, 170, 0, 50, 50, 0, 3000)
    batch = flat_tokens.TokenBatch.from_sequences([rng.integers(8, 1000, n, dtype=np.int64) for n in lengths])
    masked = batch._replace(loss_mask=rng.integers(0, 2, batch.token_count, np.uint8))
    flat_tokens.write_dataset(tmp_path / "made", [masked], [masked if masked_validation else batch])
    exported(tmp_path / "made", tmp_path / "out", format, tokens_per_file=700, **options)
    assert len(list((tmp_path / "out").rglob(files))) > 1
    import_dataset(tmp_path / "out", tmp_path / "back", options=options)
    assert content(tmp_path / "back") == content(tmp_path / "made")
    assert (content(tmp_path / "back")["validation"][1] is None) is not masked_validation


IDS = pa.array([[5, 6], [7, 8]], pa.list_(pa.int32()))


def table(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def mask_of(path: Path, options: dict[str, Any] | None = None) -> list[int] | None:
    (split,) = open_any(path, "parquet", Parquet(**(options or {}))).splits.values()
    masks = [batch.loss_mask for batch in split.batches()]
    return None if masks[0] is None else np.concatenate(masks).tolist()


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        ([[5, 6], [7]], "row 1 has 1 labels for 2 tokens"),
        ([[5, 6], [7, 1]], "row 1 has label 1 for token 8"),
        ([[-1, 6], [7, 8]], "row 0 has label -1 for token 5"),
        ([[5, -101], [7, 8]], "row 0 holds -101, but labels are -100 to 2147483647"),
        ([[5, 6], None], "row 1 is null"),
    ],
)
def test_labels_that_are_no_mask_are_refused(tmp_path, labels, complaint):
    """With the file and the row; they can be passed over."""
    path = table(tmp_path / "a.parquet", input_ids=IDS, labels=pa.array(labels, pa.list_(pa.int64())))
    with refusal(f"{path}: {complaint}"):
        mask_of(path)
    assert mask_of(path, {"labels": "ignore"}) is None


@pytest.mark.parametrize("labels", [[1, 0], [[0.5, 1.0], [1.0, 2.0]]])
def test_a_label_of_a_row_is_no_mask(tmp_path, labels):
    assert mask_of(table(tmp_path / "a.parquet", input_ids=IDS, labels=labels)) is None
    assert mask_of(table(tmp_path / "b.parquet", other=IDS, labels=IDS), {"column": "labels"}) is None


MASKS: list[tuple[dict[str, Any], list[list[int]], list[int] | None]] = [
    ({"attention_mask": [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]}, [[7, 8], [1, 2, 3], []], None),
    (
        {"completion_mask": [[0, 0, 1, 1], [0, 1, 1, 1], [1] * 4]},
        [[5, 6, 7, 8], [1, 2, 3, 4], [9] * 4],
        [0, 0, 1, 1, 0] + [1] * 7,
    ),
    (
        {
            "attention_mask": [[False, True, True, True], [True, True, False, False], [True] * 4],
            "assistant_masks": [[0, 0, 1, 1], [1, 0, 0, 0], [0] * 4],
            "labels": [[0, 6, 7, -100], [-100, 2, 0, 0], [9] * 4],
        },
        [[6, 7, 8], [1, 2], [9] * 4],
        [0, 1, 0, 0, 0, 0, 0, 0, 0],
    ),
]


@pytest.mark.parametrize(("masks", "documents", "counted"), MASKS)
def test_masks_of_trainers_are_read_and_padding_is_not(tmp_path, masks, documents, counted):
    """Padding is on the left, on the right, or all of a row. A token counts if all masks of the loss say so."""
    path = table(tmp_path / "a.parquet", input_ids=[[5, 6, 7, 8], [1, 2, 3, 4], [9] * 4], **masks)
    import_dataset(path, tmp_path / "out")
    assert content(tmp_path / "out")["train"] == (documents, counted)


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("attention_mask", [[1, 0, 1]], "row 0 has padding between tokens, by 'attention_mask'"),
        ("attention_mask", [[1, 2, 1]], "row 0 has attention_mask value 2 for token 6"),
        ("attention_mask", [1], "column 'attention_mask' is of type 'int64', but a mask is lists of 0 and 1. Rename it"),
        ("assistant_masks", [[1, 1]], "row 0 has 2 assistant_masks values for 3 tokens"),
    ],
)
def test_columns_that_are_no_masks_are_refused(tmp_path, name, values, complaint):
    path = table(tmp_path / "a.parquet", input_ids=[[5, 6, 7]], **{name: values})
    with refusal(complaint):
        mask_of(path)


def test_files_without_labels_count_whole_among_others_of_any_width(tmp_path):
    kinds = (pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.int16(), 2))
    for name, kind in zip("abcd", (None, *kinds), strict=True):
        columns = {"labels": pa.array([[-100, 6], [7, -100]], kind)} if kind else {}
        table(tmp_path / f"in/{name}.parquet", input_ids=IDS, **columns)
    import_dataset(tmp_path / "in", tmp_path / "out")
    assert content(tmp_path / "out")["train"] == ([[5, 6], [7, 8]] * 4, [1, 1, 1, 1, *[0, 1, 1, 0] * 3])


def test_the_command_says_what_labels_are(masked, tmp_path, tool):
    exported(masked, tmp_path / "out", "parquet")
    tool.out("import", tmp_path / "out", tmp_path / "plain", "--format", "parquet", "--labels", "ignore")
    assert content(tmp_path / "plain")["train"] == (SEQUENCES, None)
    assert "--labels" in tool.errors("export", masked, tmp_path / "other", "--to", "parquet", "--labels", "ignore")


# Masks in files of their own


def files_of(out: Path, format: str) -> list[Path]:
    return sorted(out.rglob("*.loss" if format == "datatrove" else "*.label_mask"))


@pytest.mark.parametrize("format", ["datatrove", "olmo-core"])
def test_a_byte_a_token_says_whether_it_counts(masked, tmp_path, monkeypatch, format):
    """An end-of-text token counts as the token before it does; that of an empty document does not."""
    monkeypatch.setattr("flat_tokens.formats.contract.BATCH_TOKENS", 2)
    done = exported(masked, tmp_path / "plain", format)
    assert files_of(tmp_path / "plain/train", format)[0].read_bytes() == bytes(MASK)
    assert not done.loses_loss_mask
    exported(masked, tmp_path / "closed", format, end_of_text=99)
    assert files_of(tmp_path / "closed/train", format)[0].read_bytes() == bytes([0, 1, 1, 1, 0, 0, 0, 1, 0, 0])


@pytest.mark.parametrize("format", ["datatrove", "olmo-core"])
def test_a_mask_that_does_not_fit_is_refused(masked, tmp_path, format):
    exported(masked, tmp_path / "out", format)
    (path,) = files_of(tmp_path / "out/train", format)
    path.write_bytes(bytes(MASK)[:-1])
    with refusal("has 5 bytes, but there are 6 tokens"):
        open_any(tmp_path / "out")
    path.write_bytes(bytes([0, 1, 2, 0, 1, 0]))
    with refusal("has 2 for token 2, but a token counts, 1, or not, 0"):
        list(open_any(tmp_path / "out").splits["train"].batches())


def test_label_masks_that_others_name_are_read(masked, tmp_path):
    """Those of open-instruct: ``labels_mask_part_0.npy`` with ``token_ids_part_0.npy``."""
    exported(masked, tmp_path / "out", "olmo-core")
    directory = tmp_path / "theirs"
    directory.mkdir()
    for path in (tmp_path / "out/train").iterdir():
        ending = path.name.partition(".")[2]
        path.rename(directory / ("labels_mask_part_0.npy" if ending == "label_mask" else f"token_ids_part_0.{ending}"))
    (split,) = open_any(directory).splits.values()
    assert np.concatenate([batch.loss_mask for batch in split.batches()]).tolist() == MASK


@pytest.mark.slow
@pytest.mark.needs("torch", "olmo_core")
def test_olmo_core_reads_the_mask(masked, tmp_path):
    data = pytest.importorskip("olmo_core.data")
    exported(masked, tmp_path / "out", "olmo-core", vocabulary_size=70_000, end_of_text=3)
    (mask,) = files_of(tmp_path / "out/train", "olmo-core")
    dataset = data.NumpyFSLDataset(
        str(mask.with_suffix(".npy")), sequence_length=5, pad_token_id=0, eos_token_id=3, vocab_size=70_000,
        label_mask_paths=[str(mask)], dtype=np.uint32,
    )  # fmt: skip
    dataset.work_dir = tmp_path
    dataset.prepare()
    rows = [dataset[i] for i in range(len(dataset))]
    assert [row["input_ids"].tolist() for row in rows] == [[5, 6, 7, 3, 3], [8, 3, 9, 10, 3]]
    assert [row["label_mask"].tolist() for row in rows] == [[False, True, True, True, False], [False, False, True, False, False]]


def test_lines_of_dolma_have_each_document_s_origin(tmp_path):
    sources = [("a,b", 1), ("c", 2)]
    docs = [*docs_of([1, 2], [3], file=0, key=10), *docs_of([4], [], file=2, key=255)]
    publish_docs(tmp_path / "made", docs, sources=sources)
    exported(tmp_path / "made", tmp_path / "out", "olmo-core", provenance=True)
    lines = gzip.decompress((tmp_path / "out/train/part-00000.csv.gz").read_bytes()).decode()
    assert list(csv.reader(lines.splitlines())) == [
        ["0", "2", f"{10:016x}", "a,b-0.jsonl", "1"],
        ["2", "3", f"{11:016x}", "a,b-0.jsonl", "2"],
        ["3", "4", f"{255:016x}", "c-1.jsonl", "1"],
        ["4", "4", f"{256:016x}", "c-1.jsonl", "2"],
    ]
    train = open_any(tmp_path / "out").splits["train"]
    assert [train.sequence(i).tolist() for i in range(4)] == [[1, 2], [3], [4], []]
    write_sequences(tmp_path / "bare", SEQUENCES)
    with refusal(r"has no record of its documents\. Export it without provenance"):
        exported(tmp_path / "bare", tmp_path / "again", "olmo-core", provenance=True)
