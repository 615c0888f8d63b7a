"""Object stores as output and source: the same bytes as on a local disk."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens import LAYOUTS
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult
from tasks.config import Source
from tasks.download.sources import resolve_source
from tasks.locations import place_of
from tests.examples import first_fast
from tests.faults.stores import ACCOUNT, BUCKETS, container_at
from tests.faults.support import build_here, objects
from tests.flat_tokens.demo import DEMO
from tests.refusal import refusal


def run(output: str, scratch: Path, **settings: Any) -> BuildResult:
    source = {"path": str(DEMO / "stories.parquet"), "id_column": "id"}
    common = {"output": output, "scratch": str(scratch), "source": source, "tokenizer": "bytes", "slice_bytes": 20_000}
    return build_here(common | settings)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on an S3 server on loopback."""
    with BUCKETS["s3"](monkeypatch) as bucket:
        yield bucket.url


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URLs of buckets on loopback, one of every kind."""
    with BUCKETS[request.param](monkeypatch) as found:
        yield found.url


@pytest.mark.parametrize("layout", first_fast(LAYOUTS, 0, every=3))
def test_object_stores_as_output_and_source_give_the_same_objects_as_a_disk(tmp_path, bucket, layout):
    """Only the manifest and the card name where the text came from."""
    Store.at(bucket).upload("text/stories.parquet", DEMO / "stories.parquet")
    settings = {"layout": layout, "slice_bytes": 60_000}
    source = {"path": f"{bucket}/text/*.parquet", "id_column": "id"}
    there = run(f"{bucket}/out", tmp_path / "scratch", source=source, **settings)
    theirs = objects(Store.at(there.path))
    local = objects(Store.at(run(str(tmp_path / "local"), tmp_path / "scratch2", **settings).path))
    assert {key for key, data in theirs.items() if local.get(key) != data} == {"manifest.json", "README.md"}
    assert local.keys() == theirs.keys()
    assert json.loads(theirs["manifest.json"])["provenance"]["sources"][0]["from"] == f"{bucket}/text/*.parquet"
    assert flat_tokens.verify(f"{bucket}/out", "full").seq_count == 189
    assert run(f"{bucket}/out", tmp_path / "scratch", source=source, **settings).was_published
    assert len(list((tmp_path / "scratch/files").glob("*.raw"))) == 1
    assert run(f"{bucket}/out", tmp_path / "anew", source=source, **settings).was_published
    assert not list((tmp_path / "anew").rglob("*.raw"))


@pytest.mark.slow
def test_a_container_of_azure_is_in_the_account_that_its_url_or_the_environment_names(monkeypatch):
    named, plain = f"abfss://bucket@{ACCOUNT}.dfs.core.windows.net/in", "az://bucket/in"
    with BUCKETS["abfs"](monkeypatch) as bucket:
        with container_at(bucket.server) as container:
            container.upload_blob("in/sub", b"", metadata={"hdi_isfolder": "true"})  # as hierarchical namespaces list directories
        store = Store.at(named)
        store.put("sub/a.jsonl", b'{"text": "salt"}\n')
        assert (store.url, Store.at(plain).url) == (named, "abfs://bucket/in")
        assert [key for key, _ in (store / "sub/a.jsonl").infos()] == [""]
        for url in (named, plain):
            (found,) = resolve_source(Source(path=url), 0).files
            assert (found.name, Store.at(found.uri).read("")) == ("sub/a.jsonl", b'{"text": "salt"}\n')
        with refusal("AZURE_STORAGE_CONNECTION_STRING is of another account"):
            Store.at("abfss://bucket@other.dfs.core.windows.net/in")
        assert place_of(named) != place_of(plain)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        assert place_of(named) == place_of(plain)
    for name in ("ACCOUNT_NAME", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}")
    with refusal(r"az://bucket/in: the account is not known\. Set AZURE_STORAGE_ACCOUNT_NAME and"):
        Store.at(plain)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with refusal(r"a store of Azure needs the package 'adlfs'\. Install it: pip install adlfs", ModuleNotFoundError):
        Store.at(plain)
