"""Small files that stand for much are refused before memory or disk is full; files that are cut off while they are read."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from flat_tokens.text import limits
from flat_tokens.text.formats import FORMATS, unpacked
from flat_tokens.text.rows import TextFile
from tests.examples import first_fast
from tests.refusal import refusal
from tests.sources import write_arrow

ROOT = Path(__file__).parents[3]
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_may_stand_for_so_many_times_its_size(monkeypatch, ending):
    data = PACK[ending](bytes(8 << 20))
    assert sum(map(len, unpacked(io.BytesIO(data), ending, "small"))) == 8 << 20
    monkeypatch.setattr(limits, "ANY_EXPANSION", 1 << 20)
    taken = []
    with pytest.raises(ValueError, match=rf"^small{ending}: [\d,]+ bytes of it .*max_expansion allows 500 times") as error:
        taken.extend(map(len, unpacked(io.BytesIO(data), ending, f"small{ending}")))
    assert "damaged" not in str(error.value)
    assert sum(taken) <= max(500 * len(data), 1 << 20)
    assert sum(map(len, unpacked(io.BytesIO(data), ending, "small", 1_000_000_000))) == 8 << 20


def table_of_20_gigabytes() -> pa.Table:
    """5,000 places in a dictionary of one text of 4 MB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), pa.array(["a" * (4 << 20)]))
    return pa.table({"text": texts})


def test_500_bytes_of_parquet_do_not_stand_for_gigabytes(tmp_path):
    path = tmp_path / "small.parquet"
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(table_of_20_gigabytes(), path, **options)
    assert path.stat().st_size < 1000
    assert text_bytes(path) <= limits.ANY_EXPANSION


def test_an_arrow_dictionary_does_not_stand_for_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ANY_EXPANSION", 0)
    path = tmp_path / "small.arrow"
    write_arrow(path, table_of_20_gigabytes())
    assert text_bytes(path, max_expansion=30) <= 30 * path.stat().st_size


def text_bytes(path: Path, max_expansion: int = limits.MAX_EXPANSION) -> int:
    """Bytes of text that come of a file before it is refused."""
    kind = FORMATS["parquet" if path.suffix == ".parquet" else "arrow"]
    file = TextFile(str(path), path.name, path.stat().st_size, "text", max_expansion=max_expansion)
    (part,) = kind.ranges(file, 1 << 60)
    seen = []
    with refusal(rf"^{path.name}: .*source\.max_expansion allows {max_expansion} times as many"):
        seen.extend(sum(map(len, rows.texts.to_pylist())) for rows in kind.read(file, part))
    return sum(seen)


CUT_OFF_WHILE_IT_IS_READ = """
import os, sys
from flat_tokens.text.formats import FORMATS
from flat_tokens.text.rows import TextFile
path = sys.argv[1]
file = TextFile(path, "cut.arrow", os.path.getsize(path), "text")
(part,) = FORMATS["arrow"].ranges(file, 1 << 40)
found = FORMATS["arrow"].read(file, part)
if sys.argv[2] == "planning":
    found = FORMATS["arrow"].ranges(file, 1 << 40)
try:
    for i, rows in enumerate(found):
        if i == 0:
            os.truncate(path, 4096)
        if sys.argv[2] == "reading":
            rows.texts.to_pylist()
    if sys.argv[2] == "reading":
        sys.exit("nobody saw it")
except (ValueError, OSError) as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("stream", "moment"),
    first_fast([(False, "reading"), (True, "planning"), (False, "planning"), (True, "reading")], 2, several=True),
)
def test_an_arrow_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path, stream, moment):
    """Not the end of the process, as it would be for a file that is mapped."""
    path = tmp_path / "cut.arrow"
    table = pa.table({"text": ["word " * 1000] * 4000, "other": ["more"] * 4000})
    write_arrow(path, table, 400, stream=stream)
    command = [sys.executable, "-c", CUT_OFF_WHILE_IT_IS_READ, str(path), moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    assert os.path.getsize(path) == 4096
