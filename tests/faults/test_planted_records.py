"""What Prefect's cache is allowed to read: receipts, checked, and nothing that anybody can plant."""

import asyncio
import base64
import json
import pickle
import shutil
from pathlib import Path

import pytest
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore

from flat_tokens.stores.store import Store
from flows.runners.receipts import ReceiptStorage, key_of_pack
from tasks.models import TokenShard
from tests.faults.support import (
    Bomb,
    Settings,
    build_here,
    digests,
    receipts,
    shards_stay,
    unpublish,
    version_digests,
)
from tests.refusal import refusal


def planted_record(fuse: Path, key: str) -> bytes:
    """A result record as Prefect writes them, whose serializer is pickle and whose result is a bomb."""
    payload = base64.b64encode(pickle.dumps(Bomb(fuse))).decode()
    metadata = {"storage_key": key, "expiration": None, "serializer": {"type": "pickle"}, "prefect_version": "3.8.8"}
    return json.dumps({"metadata": metadata, "result": payload}).encode()


@pytest.fixture
def output(settings: Settings) -> Path:
    """Token shards that no version holds."""
    with shards_stay():
        build_here(settings)
    unpublish(Path(settings["output"]))
    return Path(settings["output"])


@pytest.fixture
def key(output: Path) -> str:
    return min(receipts(output))


@pytest.fixture
def storage(output: Path) -> ReceiptStorage:
    return ReceiptStorage.at(Store.at(output))


def fresh_store(output: Path) -> ResultStore:
    """The store through which Prefect looks a task's key up, which has nothing in memory yet."""
    return ResultStore(result_storage=ReceiptStorage.at(Store.at(output)))


def test_the_planted_record_is_one_that_prefect_would_run(tmp_path):
    """Without our storage, the same bytes under the same key run: the other tests test something."""
    fuse = tmp_path / "fuse"
    (tmp_path / "results").mkdir()
    (tmp_path / "results/key").write_bytes(planted_record(fuse, "key"))
    store = ResultStore(result_storage=LocalFileSystem(basepath=str(tmp_path / "results")))
    assert store.exists("key")
    store.read("key")
    assert fuse.exists()


def test_a_record_is_made_of_the_receipt(storage, output, key):
    record = json.loads(storage.read_path(key))
    assert record["metadata"]["serializer"]["type"] == "json"
    assert record["metadata"]["storage_key"] == key
    facts = json.loads((output / f"_cache/{key}/receipt.json").read_bytes())
    facts.pop("sha256")
    shard = TokenShard.model_validate(facts)
    store = fresh_store(output)
    assert store.exists(key)
    assert store.read(key).result == [shard]
    assert json.loads(asyncio.run(storage.aread_path(key))) == record
    # Damage after a look is seen at the next one. Prefect asks and then reads: both have one check, the next pair has its own.
    shutil.rmtree(output / "_cache" / key)
    with refusal("no receipt"):
        storage.read_path(key)


def test_slices_of_one_task_are_found_together_or_not_at_all(output):
    keys = sorted(receipts(output))
    assert len(keys) > 1
    together = key_of_pack(keys)
    assert [shard.key for shard in fresh_store(output).read(together).result] == keys
    (output / f"_cache/{keys[-1]}/receipt.json").unlink()
    assert not fresh_store(output).exists(together)
    assert fresh_store(output).exists(keys[0])


def test_a_planted_record_is_never_run(settings, storage, key):
    """Wherever below the output it stands, a shard's own files included: it is a miss, and the same bytes are built."""
    output = Path(settings["output"])
    fuse = output.parent / "fuse"
    with shards_stay():
        version = build_here(settings).version
    expected = version_digests(output, version)
    unpublish(output)
    planted = planted_record(fuse, key)
    shard = output / "_cache" / key
    sound = shutil.copytree(shard, output.parent / "sound")
    for name in digests(sound):
        shutil.copytree(sound, shard, dirs_exist_ok=True)
        (shard / name).write_bytes(planted)
        assert not fresh_store(output).exists(key), name
    for place in (f"_cache/{key}", key, f"results/{key}", f".prefect/{key}", f"versions/{key}", f"runs/{key}", f"_staging/{key}"):
        path = output / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(planted)
        assert not fresh_store(output).exists(key), place
        with refusal("no receipt"):
            storage.read_path(key)
    (output / f"versions/{key}").unlink()
    build_here(settings)
    assert version_digests(output, version) == expected
    assert not fuse.exists()


def test_nothing_is_written_for_prefect_and_what_is_no_shard_is_a_miss(storage, output, key, tmp_path):
    """It writes neither over a receipt nor beside it."""
    before = digests(output)
    storage.write_path(key, b"anything")
    asyncio.run(storage.awrite_path(key, b"anything"))
    for name in ("0" * 64, "new", ".", "../outside", "/outside", "a/b", f"_cache/{key}/receipt.json"):
        storage.write_path(name, b"anything")
        asyncio.run(storage.awrite_path(name, b"anything"))
        with refusal("no receipt"):
            storage.read_path(name)
        assert not fresh_store(output).exists(name)
    assert digests(output) == before
    assert not (tmp_path / "outside").exists()
