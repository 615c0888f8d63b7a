"""Object stores on loopback behind the proxy that spoils what passes, and builds on them."""

import asyncio
import atexit
import base64
import contextlib
import importlib
import logging
import math
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import requests

import flat_tokens.stores.retry
from tests.proxy import Proxy, proxy

QUICKER = 50
"""So many times shorter are all waits between tries, of the clients of stores too: what is tried, and how often, stays."""

SECRET = "fJ8marker0Qz7Lk2VbT"


class _QuickAsyncio(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("asyncio")

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / QUICKER)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no try wait long for the next one, and no silence be borne for long."""
    for client in ("s3fs.core", "gcsfs.retry", "gcsfs.core", "aiobotocore.endpoint"):
        monkeypatch.setattr(importlib.import_module(client), "asyncio", _QuickAsyncio())
    if find_spec("adlfs"):
        transport = importlib.import_module("azure.core.pipeline.transport").AsyncHttpTransport
        monkeypatch.setattr(transport, "sleep", lambda self, seconds: asyncio.sleep(seconds / QUICKER))
        monkeypatch.setattr(importlib.import_module("azure.storage.blob._shared.base_client_async"), "READ_TIMEOUT", 0.5)
    monkeypatch.setattr("flat_tokens.stores.retry.FIRST_WAIT", flat_tokens.stores.retry.FIRST_WAIT / QUICKER)
    monkeypatch.setattr("flat_tokens.stores.retry.LONGEST_WAIT", flat_tokens.stores.retry.LONGEST_WAIT / QUICKER)
    monkeypatch.setattr("flat_tokens.stores.store.SILENCE_SECONDS", 1.5)
    monkeypatch.setattr("flows.watch.terminal.EVERY_SECONDS", 600.0)  # a slow machine prints no line more
    for server in ("werkzeug", "gcp_storage_emulator"):  # they tell of every request
        monkeypatch.setattr(logging.getLogger(server), "disabled", True)


def reach(monkeypatch: pytest.MonkeyPatch, protocol: str, url: str) -> None:
    """Let this process's clients of a kind of store ask at *url*, by ambient credentials."""
    if protocol == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    elif protocol == "abfs":
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
    else:
        # Read when gcsfs is imported: what it would look up else, no emulator knows, and it waits for a minute.
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        monkeypatch.setenv("NO_GCE_CHECK", "true")  # it would look for credentials in the network
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    fsspec.get_filesystem_class(protocol).clear_instance_cache()


@dataclass
class Bucket:
    """A bucket, by its *url*. What this process asks of it goes through *proxy*; *server* is behind that."""

    url: str
    proxy: Proxy
    server: str

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]


@contextlib.contextmanager
def behind_proxy(monkeypatch: pytest.MonkeyPatch, protocol: str, server: str) -> Iterator[Bucket]:
    """The bucket of a server, which this process reaches through a proxy."""
    try:
        with proxy(server) as between:
            reach(monkeypatch, protocol, between.url)
            yield Bucket(f"{protocol}://bucket", between, server)
    finally:
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


@contextlib.contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on an S3 server."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        requests.put(f"{address}/bucket", timeout=10).raise_for_status()
        with behind_proxy(monkeypatch, "s3", address) as bucket:
            yield bucket
    finally:
        requests.post(f"{address}/moto-api/reset", timeout=10)  # another one here would find the bucket
        server.stop()


@contextlib.contextmanager
def gs_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on an emulator of Google Cloud Storage, made as strict as the store itself is: the proxy knows conditions on
    uploads, and an upload of which half comes is none.
    """
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed: make peers")
    read = emulator._read_raw_data

    def read_all(handler: Any) -> Any:
        data = read(handler)
        if len(data or b"") < int(handler.headers.get("Content-Length") or 0):
            raise ConnectionError("half an upload")
        return data

    monkeypatch.setattr(emulator, "_read_raw_data", read_all)
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    server._api._httpd.handle_error = lambda request, client_address: None
    server._api._httpd.socket.listen(128)  # where more than five ask at once, the others would wait for a second
    try:
        address = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
        with behind_proxy(monkeypatch, "gs", address) as bucket:
            bucket.proxy.conditions = True
            yield bucket
    finally:
        server.stop()


AZURITE = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(SECRET.encode()).decode()


_azurites = list[tuple[float, subprocess.Popen[str], str]]()


def azurite(seconds: float = math.inf) -> str:
    """The address of this process's Azurite, without the account. It takes seconds to start: another one is only started if it
    is older than *seconds*.
    """
    if _azurites and time.monotonic() < _azurites[-1][0] + seconds:
        return _azurites[-1][2]
    if not AZURITE.exists():
        pytest.skip("azurite is not installed: make peers, where npm is there")
    options = [
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--blobPort",
        "0",
        "--blobHost",
        "127.0.0.1",
    ]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    server = subprocess.Popen([AZURITE, *options, "--silent"], stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.kill)
    for _, former, _ in _azurites:
        former.kill()
    assert server.stdout is not None
    line = next(line for line in server.stdout if "successfully listens on" in line)
    _azurites.append((time.monotonic(), server, line.split()[-1]))
    return _azurites[-1][2]


def connection_string(address: str) -> str:
    """What clients of Azure are told of an account at an address."""
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={address}/{ACCOUNT};"


def container_at(address: str) -> Any:
    """The container at an address, by the client of Azure itself."""
    client = importlib.import_module("azure.storage.blob").ContainerClient
    return client.from_connection_string(connection_string(address), "bucket")


@contextlib.contextmanager
def az_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty container of an emulator of Azure's blob storage."""
    pytest.importorskip("adlfs")
    address = azurite()
    with container_at(address) as container:
        if container.exists():
            container.delete_container()
        container.create_container()
        with behind_proxy(monkeypatch, "abfs", address) as bucket:
            yield bucket


BUCKETS = {"s3": s3_bucket, "gs": gs_bucket, "abfs": az_bucket}
"""By the protocol of their URLs."""
