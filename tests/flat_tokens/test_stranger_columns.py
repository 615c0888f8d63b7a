"""Kept columns of a stranger: whatever few bytes stand for, reading them takes bounded memory or is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from flat_tokens.columns import Columns, name_of, parts_of
from flat_tokens.stores.store import Store
from tests.examples import first_fast
from tests.refusal import refusal

ROWS = 16384
LONG = "x" * 220_000


COLUMNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one long text in a dictionary": ([LONG] * ROWS, {"compression": "zstd"}),
    "a long text among short ones": ([LONG, *map(str, range(999)), *[LONG] * (ROWS - 1000)], {"compression": "zstd"}),
    "plain pages": ([LONG] * 4000, {"use_dictionary": False, "compression": "zstd", "data_page_size": 1 << 26}),
    "one page of plain texts": ([LONG] * 4000, {"use_dictionary": False, "compression": "zstd", "data_page_size": 1 << 30}),
    "prefixes in common": (
        [LONG] * ROWS,
        {"use_dictionary": False, "column_encoding": {"t": "DELTA_BYTE_ARRAY"}, "compression": "zstd"},
    ),
    "lengths and texts": (
        [LONG] * 4000,
        {"use_dictionary": False, "column_encoding": {"t": "DELTA_LENGTH_BYTE_ARRAY"}, "compression": "zstd"},
    ),
}
READERS = {
    "trace": "columns.take(np.array([count - 1]), ['t'])",
    "a thousand documents": "columns.take(np.arange(1000), ['t'])",
    "select(where=)": "columns.take(np.arange(count), ['t'])",
    "verify --full": "for fault in columns.faults(): raise ValueError(fault)",
}
PROGRAM = """
import sys
import numpy as np
import pyarrow.parquet
from flat_tokens.columns import Columns, name_of, parts_of
from flat_tokens.stores.store import Store
count = int(sys.argv[2])
columns = Columns(Store.at(sys.argv[1]), {"t": "text"}, parts_of([name_of("train", 0)], "train", count))
try:
    exec(sys.argv[3])
except ValueError as error:
    print("refused:", error)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def stored(root: Path, table: pa.Table, **options: Any) -> Columns:
    """The columns of an object of this table."""
    path = root / name_of("train", 0)
    path.parent.mkdir(parents=True)
    pa.parquet.write_table(table, path, **options)
    return Columns(Store.at(root), {"t": "text"}, parts_of([name_of("train", 0)], "train", len(table)))


def made(root: Path, column: str) -> int:
    """Write the object of a column; its rows."""
    values, settings = COLUMNS[column]
    path = root / name_of("train", 0)
    path.parent.mkdir(parents=True)
    # In parts, so that the test does not take the memory that it is about.
    with pa.parquet.ParquetWriter(path, pa.schema([("t", pa.string())]), write_statistics=False, **settings) as writer:
        for start in range(0, len(values), 4000):
            writer.write_table(pa.table({"t": values[start : start + 4000]}), row_group_size=len(values))
    return len(values)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the peak")
@pytest.mark.parametrize("column", first_fast(COLUMNS, 0, every=2))
def test_few_bytes_take_bounded_memory(column, tmp_path):
    count = made(tmp_path, column)
    for name, reads in READERS.items():
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(count), reads], capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, (name, told.returncode, told.stderr)
        *refused, megabytes = told.stdout.splitlines()
        # LARGEST_TAKEN is 1 GiB; a batch and what decoder and allocator keep come to it. Read whole: 3.6 GB.
        assert int(megabytes) < 2000, (name, told.stdout)
        if name == "select(where=)":
            assert refused, name


def test_a_text_that_all_documents_have_is_no_fault(tmp_path):
    """Such as a licence: it is once in a dictionary, and it is read so."""
    text = "licence " * 4000
    columns = stored(tmp_path, pa.table({"t": [text] * ROWS}), compression="zstd")
    assert list(columns.faults()) == []
    assert columns.take(np.array([5, ROWS - 1]), ["t"]).column(0).to_pylist() == [text, text]


@pytest.mark.parametrize("depth", [1, 20, 300])
def test_columns_within_a_column_are_a_fault(depth, tmp_path):
    """However many there are within each other."""
    kind = pa.string()
    for _ in range(depth):
        kind = pa.struct([("t", kind)])
    columns = stored(tmp_path, pa.table({"t": pa.nulls(3, kind)}), store_schema=False)
    with refusal(r"0\.parquet: (column 't' has columns within it|cannot be read \(.* too deeply nested)"):
        columns.take(np.arange(3), ["t"])
    assert len(list(columns.faults())) == 1


def test_what_is_refused_names_the_object_and_the_next_step(tmp_path, monkeypatch):
    columns = stored(tmp_path, pa.table({"t": ["x" * 1000] * 100}))
    monkeypatch.setattr("flat_tokens.columns.LARGEST_TAKEN", 50_000)
    with refusal(r"0\.parquet: columns of 100 documents .* Read fewer documents"):
        columns.take(np.arange(100), ["t"])
    monkeypatch.setattr("flat_tokens.columns.ANY_EXPANSION", 10)
    monkeypatch.setattr("flat_tokens.columns.MAX_EXPANSION", 0)
    assert "bytes of it stand for" in next(columns.faults())
