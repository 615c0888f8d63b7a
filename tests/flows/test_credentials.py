"""Stores whose credentials are in a block: runs know its name, and what it holds stays in their process."""

import json
from collections.abc import Iterator

import fsspec
import pytest
from prefect.blocks.system import Secret

import flat_tokens
from flat_tokens.stores import signing
from flat_tokens.stores.store import Store
from flows.build import build_dataset
from flows.credentials import credentials
from flows.verify import verify_dataset
from tasks.config import BuildConfig
from tasks.locations import CREDENTIALS
from tests.faults.stores import BUCKETS
from tests.faults.support import settings_of, write_notes
from tests.flows.asked import ask
from tests.keys import KEY

HIDDEN = "hidden-in-the-block-7Qz"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket that is reached by what the block secret/buckets holds, and by nothing ambient."""
    with BUCKETS["s3"](monkeypatch) as found:
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(variable)
        client = {"endpoint_url": found.proxy.url, "region_name": "us-east-1"}
        options = {"s3": {"key": "AKIABLOCK", "secret": HIDDEN, "client_kwargs": client}}
        Secret(value=json.dumps(options)).save("buckets", overwrite=True)
        monkeypatch.setenv(CREDENTIALS, "secret/buckets")
        yield found.url


def told() -> str:
    """All that the server tells of runs: parameters, log lines, artifacts, events."""
    most = {"flow_runs": 200, "logs": 200, "artifacts": 200, "events": 50}
    return json.dumps([ask(f"/{name}/filter", limit=limit) for name, limit in most.items()], ensure_ascii=False)


def test_a_build_reaches_its_store_by_a_block_and_tells_nobody_what_it_holds(bucket, tmp_path):
    notes = write_notes(tmp_path / "notes.jsonl", 1)
    settings = settings_of(f"{bucket}/out", notes, scratch=f"{tmp_path}/scratch", name="by-block")
    result = build_dataset(BuildConfig.model_validate(settings))
    assert verify_dataset(f"{bucket}/out", "full")["seq_count"] == 1
    assert "s3" not in fsspec.config.conf  # nothing of it is left

    with credentials():
        root = Store.at(bucket)
        stored = {key: root.read(key) for key, _ in root.listing()}
        assert flat_tokens.verify(result.path, "full").seq_count == 1
    assert len(stored) > 10
    assert [key for key, content in stored.items() if HIDDEN.encode() in content] == []
    everything = told()
    assert "build by-block with bytes" in everything
    assert HIDDEN not in everything


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("s3-bucket/mine", {}, "names a Secret block of Prefect's, such as secret/buckets"),
        ("secret/nobody", None, "there is no block secret/nobody"),
        ("secret/odd", HIDDEN, "does not hold a JSON object"),
        ("secret/odd", {"s3": HIDDEN}, "does not hold a JSON object"),
        ("secret/odd", {"signing": {"keys": HIDDEN}}, "the block secret/odd has no ed25519 keys in PEM alone"),
        (
            "secret/odd",
            {"ftp": {"password": HIDDEN}},
            "the block secret/odd has options for ftp; known are http, https, gs, gcs, s3, s3a, az, ",
        ),
    ],
)
def test_what_is_no_such_block_is_told_without_what_it_holds(monkeypatch, name, value, message):
    if value is not None:
        Secret(value=value).save("odd", overwrite=True)
    monkeypatch.setenv(CREDENTIALS, name)
    with pytest.raises((ValueError, PermissionError), match=message) as refused, credentials():
        pass
    assert HIDDEN not in str(refused.value)


def test_keys_that_sign_are_in_the_block_too(tmp_path, monkeypatch):
    """They sign in all threads of a run, and nobody is told them."""
    key = KEY.decode()
    Secret(value={"signing": {"keys": key}}).save("odd", overwrite=True)
    monkeypatch.setenv(CREDENTIALS, "secret/odd")
    settings = settings_of(tmp_path / "out", write_notes(tmp_path / "notes.jsonl", 1), name="signed-by-block")
    build_dataset(BuildConfig.model_validate(settings))
    assert verify_dataset(f"{tmp_path}/out", "full")["seq_count"] == 1
    assert signing.keys() == b""
    with signing.using(KEY):
        assert flat_tokens.open(tmp_path / "out").train.store is not None
    assert "signing" not in fsspec.config.conf
    secret = KEY.splitlines()[1]
    assert secret.decode() not in told()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_options_that_were_there_are_there_again(monkeypatch):
    Secret(value={"s3": {"key": "b"}}).save("odd", overwrite=True)
    monkeypatch.setenv(CREDENTIALS, "secret/odd")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "a", "anon": False})
    with credentials():
        assert fsspec.config.conf["s3"] == {"key": "b", "anon": False}
    assert fsspec.config.conf["s3"] == {"key": "a", "anon": False}
