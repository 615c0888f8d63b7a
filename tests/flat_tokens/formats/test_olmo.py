"""OLMo-core's token files: their bytes, OLMo-core's own reading and writing of them, and metadata that lie."""

import gzip

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import olmo as module
from flat_tokens.formats import open_any
from tests.examples import examples
from tests.refusal import refusal


@given(bounds=st.lists(st.tuples(*[st.one_of(st.integers(0, 2**60), st.integers(0, 30))] * 2), max_size=20))
@examples(50)
def test_lines_are_written_as_python_writes_numbers(bounds):
    numbers = np.array(bounds, np.int64).reshape(-1, 2)
    assert module._lines(numbers[:, 0], numbers[:, 1]) == "".join(f"{a},{b}\n" for a, b in bounds).encode()


def test_metadata_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ALWAYS_TEXT", 1000)
    (tmp_path / "a.npy").write_bytes(bytes(12))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,0\n" * 1000))
    with refusal(r"a\.csv\.gz: cannot be read as gzipped lines \(has more than 1768 bytes of text\)"):
        open_any(tmp_path)


def test_numpys_own_files_are_others(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,4\n"))
    assert open_any(tmp_path).format == "build-nanogpt"
