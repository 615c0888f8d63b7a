"""OLMo-core's token files: their bytes, OLMo-core's own reading and writing of them, and metadata that lie."""

import gzip

import numpy as np

from flat_tokens.formats import open_any
from tests.refusal import refusal


def test_metadata_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("flat_tokens.formats.olmo.ALWAYS_TEXT", 1000)
    (tmp_path / "a.npy").write_bytes(bytes(12))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,0\n" * 1000))
    with refusal(r"a\.csv\.gz: cannot be read as gzipped lines \(has more than 1768 bytes of text\)"):
        open_any(tmp_path)


def test_numpys_own_files_are_others(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,4\n"))
    assert open_any(tmp_path).format == "build-nanogpt"
