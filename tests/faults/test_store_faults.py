"""Object stores that are busy, cut connections and lose acknowledgements: what is written and read is right, or a clear error.

Whole commands on such stores are trials of the harness: ``python -m tests.faults --only stores --only together``.
"""

import logging
import re
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.config import HubDataset, Source
from tasks.download.hub import fetch_hub, resolve_hub
from tasks.output.swap import read_state, swap
from tests.examples import first_fast
from tests.faults.stores import BUCKETS, SECRET, Bucket, hurry
from tests.faults.support import build_here, objects, settings_of, write_notes
from tests.made import write_sequences
from tests.proxy import MANY_FAULTS, at_random, proxy
from tests.refusal import refusal
from tests.stand_in_hub import isolate, stand_in_hub_fixture  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # gcsfs, of 1 MiB and more


@pytest.fixture(scope="module", params=first_fast(BUCKETS, every=2))
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with pytest.MonkeyPatch.context() as monkeypatch, BUCKETS[request.param](monkeypatch) as bucket:
        hurry(monkeypatch)
        yield bucket


@pytest.fixture
def bucket(server: Bucket) -> Iterator[Bucket]:
    """An empty bucket, without faults as yet."""
    fs = Store.at(server.url).fs
    for path in fs.find("bucket"):
        fs.rm_file(path)
    server.proxy.requests.clear()
    server.proxy.faults.clear()
    yield server
    server.proxy.calm()
    server.proxy.stall_seconds = 5.0


@pytest.mark.slow
def test_a_spoiled_store_keeps_large_objects_whole(bucket, monkeypatch, tmp_path):
    """They go up in parts, of which each may be lost. If the last acknowledgement is, the store knows of no such upload any more:
    begun anew, it becomes the same object.
    """
    monkeypatch.setattr("flat_tokens.stores.store.PART_BYTES", 5 << 20)  # the least that S3 takes
    store = Store.at(f"{bucket.url}/large", staging=str(tmp_path / "staging"))
    if bucket.protocol == "abfs":  # its client would put 64 MiB at once
        monkeypatch.setattr(store.fs.service_client._config, "max_single_put_size", 5 << 20)
    data, parts, lost = np.random.default_rng(0).bytes(12_000_000), [], []

    def lose_the_last(method: str, path: str) -> str | None:
        if "comp=blocklist" in path or (method == "POST" and re.search("upload_?id", path, re.IGNORECASE)):
            parts.append(path)
            if not lost and len(parts) == (3 if bucket.protocol == "gs" else 1):
                lost.append(path)
                return "lost"
        return None

    rules = (lose_the_last, *(at_random(seed, {**MANY_FAULTS, "lost": 0.05}) for seed in range(3)))
    for number, bucket.proxy.spoil in enumerate(rules):
        with store.create(f"object-{number}") as writer:
            for start in range(0, len(data), 1_000_003):
                writer.write(data[start : start + 1_000_003])
        assert store.digest(f"object-{number}") == writer.stored
        assert store.read(f"object-{number}") == data
    assert lost
    assert list((tmp_path / "staging").iterdir()) == []


def test_faults_that_pass_are_not_noticed(bucket):
    """Whatever is asked, and however many of them come in a row."""
    store = Store.at(f"{bucket.url}/below")
    for faults in (["429", "503", "reset", "half"], ["lost"], ["half upload", "lost", "429"]):
        for act, expected in (
            (lambda: store.put("a/object", b"content").size, 7),
            (lambda: store.read("a/object"), b"content"),
            (lambda: store.read_range("a/object", 2, 5), b"nte"),
            (lambda: store.read_ranges(["a/object"] * 2, [-3, 0], [None, 2]), [b"ent", b"co"]),
            (lambda: store.size("a/object"), 7),
            (lambda: (store.exists("a/object"), store.exists("a"), store.exists("b")), (True, True, False)),
            (lambda: store.digest("a/object").size, 7),
            (lambda: list(store.listing()), [("a/object", 7)]),
            (lambda: store.remove("a/object"), None),
            (lambda: list(store.listing()), []),
        ):
            bucket.proxy.left[:] = faults
            assert act() == expected


def test_a_short_silence_is_no_harm_and_a_store_that_stays_silent_is_given_up(bucket, monkeypatch):
    """No call hangs. The error names the object, and is one of those that another try may mend."""
    monkeypatch.setattr("flat_tokens.stores.store.SILENCE_SECONDS", 0.2)
    store = Store.at(f"{bucket.url}/out")
    bucket.proxy.stall_seconds = 60
    bucket.proxy.left[:] = ["stall", "stall", "stall"]
    store.put("object", b"content")
    assert store.read("object") == b"content"
    assert bucket.proxy.left == []
    bucket.proxy.spoil = lambda method, path: "stall"
    with refusal(rf"^{bucket.url}/out/object: no answer in \d+ tries", TimeoutError):
        replace(store, patience=0.1).exists("object")


@pytest.mark.parametrize("trouble", ["no bucket", "403", "503"])
def test_what_does_not_pass_is_told_at_once(bucket, tmp_path, trouble, monkeypatch):
    """Before any work, and without asking again and again. A store that gives no other answer is not asked as long as later."""
    monkeypatch.setattr("tasks.output.places.FIRST_CONTACT_SECONDS", 0.0)
    output = f"{bucket.url}/out" if trouble.isdigit() else f"{bucket.protocol}://no-such-bucket/out"
    settings = settings_of(tmp_path, write_notes(tmp_path / "notes.jsonl", 3))
    bucket.proxy.requests.clear()
    bucket.proxy.spoil = lambda method, path: trouble if trouble.isdigit() else None
    with pytest.raises(ValueError, match=rf"^cannot write to output {output} \(.+\)\. Check the address") as raised:
        build_here({**settings, "output": output}, 1)
    assert len(bucket.proxy.requests) <= (60 if trouble == "503" else 4)  # clients of stores ask busy ones again by themselves
    assert SECRET not in str(raised.value)


def test_half_an_upload_is_never_seen(bucket):
    """Neither instead of nothing nor instead of what was there."""
    store = replace(Store.at(f"{bucket.url}/out"), patience=0.0)
    store.put("there", b"old")
    bucket.proxy.spoil = lambda method, path: "half upload" if method in ("PUT", "POST") else None
    for key in ("there", "new"):
        with refusal("no answer", TimeoutError):
            store.put(key, bytes(100_000))
    bucket.proxy.calm()
    assert dict(store.listing()) == {"there": 3}


@pytest.mark.parametrize("fault", ["lost", "half", "503"])
def test_the_pointer_is_moved_once_whatever_is_lost(bucket, fault):
    """The write was done and its acknowledgement lost, or it was not done: both are found out by reading."""
    root = Store.at(f"{bucket.url}/pointer-{fault}")
    content = [b"first", b"second", b"third"]
    for i, data in enumerate(content):
        seen, left = read_state(root, "latest.json"), [fault]
        bucket.proxy.spoil = lambda method, path, left=left: left.pop() if method in ("PUT", "POST") and left else None  # type: ignore[misc]
        assert swap(root, "latest.json", seen, data)
        assert left == []
        assert root.read("latest.json") == data
        assert not swap(root, "latest.json", seen, b"of somebody who was asleep")
        assert root.read("latest.json") == content[i]


def test_another_machines_move_is_not_undone(bucket, monkeypatch):
    """It writes after we have looked, while our first try is lost on its way: there is no second one."""
    root = Store.at(f"{bucket.url}/race")
    assert swap(root, "latest.json", read_state(root, "latest.json"), b"one")

    def lose(*_: object) -> bool:
        monkeypatch.undo()
        root.put("latest.json", b"theirs")
        raise ConnectionResetError("lost on its way")

    monkeypatch.setattr("tasks.output.swap._write_if", lose)
    assert not swap(root, "latest.json", read_state(root, "latest.json"), b"mine")
    assert root.read("latest.json") == b"theirs"


def test_a_listing_that_lags_hides_nothing(monkeypatch):
    """What a listing does not show yet is asked for by its name, and what was never there is missed."""
    url = f"memory://{uuid.uuid4().hex}"
    write_sequences(url, [np.arange(5, dtype=np.uint32)])
    hidden, real = "train/seq_starts/zarr.json", Store.listing
    monkeypatch.setattr(Store, "listing", lambda store: (item for item in real(store) if item[0] != hidden))
    assert flat_tokens.verify(url, "full").seq_count == 1
    Store.at(url).remove(hidden)
    with refusal(f"{hidden} is missing"):
        flat_tokens.verify(url)


def test_files_of_a_hub_that_cuts_connections_are_whole(stand_in_hub, tmp_path, monkeypatch):
    """The half of an answer is not taken for the file."""
    contents = {f"train-{i}.jsonl": b'{"text": "%d"}\n' % i * 20_000 for i in range(3)}
    stand_in_hub.commit("org/name", contents)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with proxy(stand_in_hub.url) as between:
        isolate(monkeypatch, between.url, tmp_path / "home")
        between.spoil = at_random(0, {"half": 0.2, "reset": 0.1})
        files = resolve_hub(Source(hub=HubDataset(path="org/name")), 0).files
        assert {file.name: fetch_hub(file, tmp_path / "files").read_bytes() for file in files} == contents
    assert "half" in between.faults


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_credentials_are_in_nothing_that_is_written_or_said(bucket, tmp_path, caplog, monkeypatch):
    """Neither in objects nor in files, logs or errors, of builds that succeed and of one that fails half way."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token-{SECRET}")
    caplog.set_level(logging.INFO)
    Store.at(bucket.url).upload("text/a.jsonl", write_notes(tmp_path / "a.jsonl", 70))
    source = {"path": f"{bucket.url}/text/*.jsonl", "id_column": "id"}
    settings = {"output": f"{bucket.url}/out", "scratch": str(tmp_path / "scratch"), "source": source, "tokenizer": "bytes"}
    settings |= {"slice_bytes": 5000, "layout": "compact", "verify_level": "full"}
    random = at_random(1)
    bucket.proxy.spoil = lambda method, path: "403" if len(bucket.proxy.requests) > 150 else random(method, path)
    with pytest.raises(OSError, match=r"Access ?Denied|Forbidden") as raised:
        build_here(settings)
    bucket.proxy.spoil = at_random(0)
    build_here(settings)
    bucket.proxy.calm()
    said = [record.getMessage() + str(record.exc_info or "") for record in caplog.records]
    said += traceback.format_exception(raised.value)
    written = {**objects(Store.at(f"{bucket.url}/out")), **{p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}}
    assert len(written) > 30
    assert SECRET not in "".join(said)
    assert [name for name, data in written.items() if SECRET.encode() in data or SECRET in name] == []
