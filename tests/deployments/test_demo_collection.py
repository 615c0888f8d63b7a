"""The demonstration collection is what its texts give."""

from pathlib import Path

import pytest

from tests.deployments.demo_collection import DEMO, write_collection


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_collection(directory)
    return directory


@pytest.mark.parametrize("name", ["stories.parquet", "notes.jsonl", "tokenizer.json"])
def test_a_file_is_written_anew_byte_for_byte(written, name):
    assert (written / name).read_bytes() == (DEMO / name).read_bytes()
