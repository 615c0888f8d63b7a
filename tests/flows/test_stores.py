"""Object stores as output and source: the same bytes as on a local disk."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import requests

import flat_tokens
from flat_tokens.storage import Store
from flows.order import BuildResult, build
from flows.threads import Threads
from tasks.models import BuildConfig

DEMO = Path(__file__).parents[2] / "deployments" / "demo"


def run(output: str, scratch: Path, **settings: Any) -> BuildResult:
    source = {"path": str(DEMO / "stories.parquet"), "id_column": "id"}
    whole = {"output": output, "scratch": str(scratch), "source": source, "tokenizer": "bytes", "slice_bytes": 20_000, **settings}
    with Threads(2) as runner:
        return build(BuildConfig.model_validate(whole), runner)


def objects(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key, _ in store.listing()}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on an S3 server on loopback, reached by ambient credentials."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    fs.mkdir("bucket")
    yield "s3://bucket"
    requests.post(f"http://{host}:{port}/moto-api/reset", timeout=10)  # another server in this process would find the bucket
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_memory_as_output_gives_the_same_objects_as_a_disk(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    there = run(url, tmp_path / "scratch")
    here = run(str(tmp_path / "out"), tmp_path / "scratch", layout="compact")
    assert there.layout == "compact"
    assert objects(Store.at(there.path)) == objects(Store.at(here.path))
    assert flat_tokens.verify(url, "full").seq_count == 189
    again = run(url, tmp_path / "scratch", validation_fraction=0.3)
    assert again.slices_reused == again.slices > 3
    assert run(url, tmp_path / "scratch").was_published
    assert not list((tmp_path / "scratch").rglob("*.part"))


@pytest.mark.slow
def test_s3_as_output_and_source_gives_the_same_objects_as_a_disk(tmp_path: Path, s3: str) -> None:
    fs, _ = fsspec.core.url_to_fs(s3)
    fs.put_file(str(DEMO / "stories.parquet"), "bucket/text/stories.parquet")
    source = {"path": f"{s3}/text/*.parquet", "id_column": "id"}
    there = run(f"{s3}/out", tmp_path / "scratch", source=source)
    here = run(str(tmp_path / "out"), tmp_path / "scratch2", layout="compact")
    mine, theirs = objects(Store.at(here.path)), objects(Store.at(there.path))
    named = {"manifest.json", "README.md"}  # these two name the source: a file here, a URL there
    assert {key: data for key, data in mine.items() if key not in named} == {
        key: data for key, data in theirs.items() if key not in named
    }
    assert json.loads(theirs["manifest.json"])["provenance"]["sources"][0]["from"] == f"{s3}/text/*.parquet"
    assert flat_tokens.verify(f"{s3}/out", "full").seq_count == 189
    assert run(f"{s3}/out", tmp_path / "scratch", source=source).was_published
    assert len(list((tmp_path / "scratch" / "files").glob("*.raw"))) == 1
