"""Rows of token lists: what is written reads in pyarrow and datasets, what they write reads here, nothing else does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats import Files
from flat_tokens.formats.parquet import ARROW, PARQUET, Arrow, Parquet
from tests.flat_tokens.formats.exporting import EXAMPLE, put, read, splits_of
from tests.refusal import refusal
from tests.sources import write_arrow

pa = pytest.importorskip("pyarrow", reason="Parquet and Arrow are written with pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet is written with pyarrow")

ROOT = Path(__file__).parents[3]


def lists(rows: Any, kind: Any = None, **columns: Any) -> Any:
    return pa.table({"input_ids": pa.array(rows, kind or pa.list_(pa.int32())), **columns})


# Writing


def test_names_are_those_by_which_datasets_finds_splits():
    splits = splits_of([[1] * 5, [2] * 5, [3] * 2], [[4]])
    assert [tuple(part) for part in PARQUET.plan(splits, Parquet(tokens_per_file=7))] == [
        ("train-00000-of-00002.parquet", "train", 0, 1),
        ("train-00001-of-00002.parquet", "train", 1, 3),
        ("validation-00000-of-00001.parquet", "validation", 0, 1),
    ]
    assert [part.key for part in ARROW.plan(splits, Arrow())] == [
        f"{split}/data-00000-of-00001.arrow" for split in ("train", "validation")
    ]


def test_a_parquet_file_is_a_column_of_int32_lists_in_row_groups(tmp_path):
    put(tmp_path / "out", Parquet(tokens_per_row_group=4, compression="zstd"), EXAMPLE)
    with pq.ParquetFile(tmp_path / "out/train-00000-of-00001.parquet", page_checksum_verification=True) as file:
        assert file.schema_arrow == pa.schema([("input_ids", pa.list_(pa.int32()))])
        assert [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)] == [2, 2, 1, 1]
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        assert file.read().column("input_ids").to_pylist() == EXAMPLE


def test_an_arrow_file_is_a_stream_that_can_be_mapped(tmp_path):
    put(tmp_path / "out", Arrow(tokens_per_batch=4), EXAMPLE)
    with pa.memory_map(str(tmp_path / "out/train/data-00000-of-00001.arrow")) as source, pa.ipc.open_stream(source) as stream:
        assert stream.schema == pa.schema([("input_ids", pa.list_(pa.int32()))])
        before = pa.total_allocated_bytes()
        table = stream.read_all()
        assert pa.total_allocated_bytes() <= before
        assert table.column("input_ids").num_chunks == 4
        assert table.column("input_ids").to_pylist() == EXAMPLE
        del table


def test_without_pyarrow_the_library_imports_and_says_what_is_missing():
    """Trainers install no pyarrow."""
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from flat_tokens.formats.parquet import PARQUET, Parquet\n"
        "from flat_tokens.formats import Files\n"
        "try: PARQUET.open(Files.at(sys.argv[1]), Parquet())\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, __file__], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pip install pyarrow" in done.stdout


# The neighbours' own readers and writers


@pytest.mark.slow
def test_datasets_loads_parquet_and_arrow(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets, which reads such files")
    parquet, arrow = str(tmp_path / "parquet"), str(tmp_path / "arrow")
    put(Path(parquet), Parquet(tokens_per_file=4, tokens_per_row_group=2), EXAMPLE, [[7, 8]])
    put(Path(arrow), Arrow(tokens_per_file=4), EXAMPLE, [[7, 8]])
    options = {"data_dir": parquet, "cache_dir": str(tmp_path / "cache")}
    for loaded in (datasets.load_dataset("parquet", **options), datasets.load_from_disk(arrow)):
        assert {name: split["input_ids"][:] for name, split in loaded.items()} == {"train": EXAMPLE, "validation": [[7, 8]]}
        assert loaded["train"].features == datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    assert datasets.load_from_disk(f"{arrow}/train")["input_ids"][:] == EXAMPLE


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_what_datasets_saved_is_read(tmp_path, dtype):
    datasets = pytest.importorskip("datasets", reason="needs datasets, which writes such directories")
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(dtype))})

    def rows(sequences: list[list[int]]) -> Any:
        return datasets.Dataset.from_dict({"input_ids": sequences}, features)

    train = [[1, 2], [], [3, 4, 5], [6] * 9] * 10
    saved = datasets.DatasetDict(train=rows(train), test=rows([[65535]]), dev=rows([[7]]))
    saved.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 3, "test": 1, "dev": 1})
    (tmp_path / "saved/train/cache-1234.arrow").write_bytes((tmp_path / "saved/test/data-00000-of-00001.arrow").read_bytes())
    assert ARROW.recognise(Files.at(tmp_path / "saved"))
    assert read(tmp_path / "saved", Arrow()) == {"train": train, "test": [[65535]], "validation": [[7]]}
    saved["train"].to_parquet(tmp_path / "train.parquet")
    assert read(tmp_path / "train.parquet", Parquet()) == {"train": train}


# Reading


KINDS = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int16(), 2), pa.list_(pa.uint64())]


def write_table(path: Path, table: Any) -> None:
    """As Parquet, as an Arrow stream or as an Arrow file, by the path's ending."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        write_arrow(path, table, 3, stream=path.suffix == ".arrow")


OTHERS = pa.table({"text": ["a"], "ids": [[1]], "scores": [[0.5]]})
FILES = pytest.mark.parametrize(("name", "chosen"), [("a.parquet", PARQUET), ("a.arrow", ARROW), ("a.ipc", ARROW)])


@FILES
@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_any_integers_are_read(tmp_path, name, chosen, kind):
    rows = [[i, i + 1] for i in range(10)]
    write_table(tmp_path / name, lists(rows, kind, text=["x" * i for i in range(10)]))
    assert chosen.recognise(Files.at(tmp_path / name))
    assert read(tmp_path / name, chosen.options()) == {"train": rows}


def test_a_row_group_larger_than_memory_should_be_is_read_piece_by_piece(tmp_path):
    """Of 64 MB in one row group, Arrow never holds more than a few batches."""
    rows = [*np.arange(1 << 24, dtype=np.int32).reshape(-1, 1 << 10)]
    pq.write_table(lists(rows, pa.list_(pa.int32())), tmp_path / "a.parquet", use_dictionary=False)
    before, split = pa.total_allocated_bytes(), PARQUET.open(Files.at(tmp_path), Parquet())["train"]
    assert max(pa.total_allocated_bytes() - before for _ in split.batches(max_tokens=1 << 18)) < 16 << 20


def test_offsets_that_lie_are_refused(tmp_path):
    """Arrow itself reads where they point."""
    path = tmp_path / "a.arrow"
    write_table(path, lists([[1, 2], [3]]))
    content, honest = path.read_bytes(), np.array([0, 2, 3], np.int32).tobytes()
    assert content.count(honest) == 1
    for offsets in ([0, 2, 1 << 30], [0, 3, 2], [-5, 1, 2], [0, 1, -1]):
        path.write_bytes(content.replace(honest, np.array(offsets, np.int32).tobytes()))
        with refusal(str(path)):
            read(path, Arrow())


ROWS: list[tuple[Any, dict[str, str], str]] = [
    (lists([[1], [2], [3], [4], None, [5]]), {}, ": row 4 is null"),
    (lists([[1], [], [2, 3], [4], [], [5, None], [6]]), {}, ": row 5 has a null among its token ids"),
    *(
        (
            lists([[1], [], [2, 3], [4], [], [5, wrong, 6], [7]], pa.list_(pa.int64())),
            {},
            f": row 5 holds {wrong}, but token ids are 0 to 2147483647",
        )
        for wrong in (-1, 2**31)
    ),
    (OTHERS, {}, r" has no column 'input_ids'; it has 'text', 'ids', 'scores'. Set column\."),
    (OTHERS, {"column": "scores"}, ": column 'scores' is of type '.*', but token ids are lists of integers"),
    (pa.Table.from_arrays([pa.array([[1]])] * 2, names=["input_ids"] * 2), {}, " has several columns 'input_ids'"),
]


@FILES
@pytest.mark.parametrize(("table", "options", "words"), ROWS)
def test_what_is_no_token_id_is_refused_by_file_and_row(tmp_path, name, chosen, table, options, words):
    write_table(tmp_path / name, table)
    with refusal(rf"{name}:?{words}"):
        read(tmp_path / name, chosen.options(**options))


def new_bytes(store: Path, path: Path) -> int:
    """Bytes of a file that a store of chunks does not have, by the chunker of the hub, which then puts them into a directory."""
    session = pytest.importorskip("hf_xet").XetSession().new_upload_commit(endpoint=f"local://{store}")
    session.start_upload_file(str(path))
    return int(session.wait_to_finish().dedup_metrics.new_bytes)


def test_two_versions_share_the_bytes_of_what_did_not_change(tmp_path):
    """A store of chunks, as the hub's, gets few of a second version in which one document of 500 is another one."""
    numbers = np.random.default_rng(0)
    first = [numbers.integers(0, 50_000, size).tolist() for size in numbers.integers(100, 3000, 3000)]
    second = [[1, 2, 3] if row % 500 == 7 else document for row, document in enumerate(first)]
    uploaded = []
    for number, documents in enumerate((first, second)):
        put(tmp_path / str(number), Parquet(tokens_per_row_group=1 << 20), documents)
        uploaded.append(new_bytes(tmp_path / "store", tmp_path / str(number) / "train-00000-of-00001.parquet"))
    assert uploaded[0] > 15_000_000  # nothing is compressed
    assert uploaded[1] < uploaded[0] / 4
