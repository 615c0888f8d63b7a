"""Builds share an output; a collection waits for none of them and keeps the next one waiting."""

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import tasks.output.leases
from flat_tokens.stores.store import Store
from tasks.output.leases import build_lease, collection_lease, expired_leases, in_use, shared_scratch
from tests.calls import before_each_call
from tests.processes import until
from tests.tasks.conftest import IN_A_STORE

ROOT = Path(__file__).parents[3]

HOLD = """
import sys
from pathlib import Path
from flat_tokens.stores.store import Store
from tasks.output.leases import build_lease
with build_lease(Store.at(sys.argv[1]), Path(sys.argv[1], "_cache")):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def test_a_collection_knows_of_every_build(root, scratch):
    assert in_use(root) is None
    with build_lease(root, scratch), build_lease(root, scratch):
        assert "a build is running" in str(in_use(root))
        with collection_lease(root) as busy:
            assert "a build is running" in str(busy)
    with collection_lease(root) as busy:
        assert busy is None
    assert in_use(root) is None
    assert list(root.listing()) == []


def test_a_build_begins_when_the_collection_has_ended(root, scratch, monkeypatch):
    monkeypatch.setattr(tasks.output.leases, "WAIT_SECONDS", 0.01)
    order = []
    waiting = threading.Event()
    monkeypatch.setattr(tasks.output.leases.logger, "info", lambda *_: waiting.set())

    def build() -> None:
        with build_lease(root, scratch):
            order.append("build")

    with collection_lease(root) as busy:
        assert busy is None
        thread = threading.Thread(target=build)
        thread.start()
        assert waiting.wait(20)
        order.append("collected")
    thread.join()
    assert order == ["collected", "build"]


def test_a_killed_build_is_running_no_more(tmp_path):
    """On a disk the system knows, at once."""
    root = Store.at(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "in\n"
        assert in_use(root)
        process.kill()
        process.wait()
    assert in_use(root) is None


def test_downloads_that_another_output_uses_are_in_use(tmp_path):
    """A rerun for another tokenizer takes the downloads from the cache of the dataset."""
    (tmp_path / "out/_cache").mkdir(parents=True)
    with shared_scratch(tmp_path / "out/_cache"):
        assert in_use(Store.at(tmp_path / "out"))
    assert in_use(Store.at(tmp_path / "out")) is None


@IN_A_STORE
def test_a_lease_that_nobody_renews_expires(root, scratch):
    for name, minutes in (("build-dead", 30), ("build-alive", 3)):
        at = datetime.now(UTC) - timedelta(minutes=minutes)
        root.put(f"_running/{name}.json", json.dumps({"at": at.isoformat()}).encode())
    assert [key for key, _ in expired_leases(root)] == ["_running/build-dead.json"]
    assert "build-alive" in str(in_use(root))
    root.remove("_running/build-alive.json")
    assert in_use(root) is None


@IN_A_STORE
@pytest.mark.skipif(not tasks.output.leases._processes(), reason="needs /proc")
def test_the_lease_of_a_process_of_this_machine_ends_with_it(root, scratch):
    """A build after a killed collection waits for nobody. Of processes elsewhere nothing is known, whatever their numbers."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with collection_lease(root):
        ((key, _),) = root.listing()
        lease = json.loads(root.read(key))
    for live in (lease, {**lease, "process": 1e999}):
        root.put(key, json.dumps(live).encode())
        assert expired_leases(root) == []
    root.put(key, json.dumps({**lease, "process": gone.pid, "among": "others"}).encode())
    assert expired_leases(root) == []
    root.put(key, json.dumps({**lease, "process": gone.pid}).encode())
    assert [name for name, _ in expired_leases(root)] == [key]
    with build_lease(root, scratch):
        pass


@IN_A_STORE
@pytest.mark.parametrize("content", [b"{", b"{}", b'{"at": 3}', b'{"at": "yesterday"}', b'{"at": "2026-01-01T00:00:00"}'])
def test_a_lease_that_cannot_be_read_is_respected(root, content):
    """Nor one whose time has no zone."""
    root.put("_running/build-odd.json", content)
    assert "build-odd" in str(in_use(root))


@IN_A_STORE
def test_a_lease_is_renewed_while_the_build_runs(root, scratch, monkeypatch):
    monkeypatch.setattr(tasks.output.leases, "RENEW_SECONDS", 0.01)
    writes = before_each_call(monkeypatch, "flat_tokens.stores.store.Store.put", lambda store, key, data: key)
    with build_lease(root, scratch):
        until(lambda: len(writes) > 2)
    assert len(set(writes)) == 1
    assert list(root.listing()) == []


@IN_A_STORE
def test_a_lease_that_cannot_be_removed_hides_nothing(root, scratch, monkeypatch, caplog):
    """The store is gone: what went wrong is told, not that; and where nothing went wrong, nothing did."""

    def refuse(path: str, **_: object) -> None:
        raise PermissionError("read only from now on")

    def go_wrong() -> None:
        raise InterruptedError("what went wrong")

    monkeypatch.setattr(root.fs, "rm_file", refuse)
    with pytest.raises(InterruptedError, match="what went wrong"), build_lease(root, scratch):
        go_wrong()
    with build_lease(root, scratch):
        pass
    assert [message for message in caplog.messages if "could not be removed, and expires: read only" in message]
