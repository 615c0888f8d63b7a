"""Object stores: the settings of their clients, and uploads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from flat_tokens.stores.local import WRITE_BUFFER_BYTES, make_directory, named_errors
from flat_tokens.stores.retry import SILENCE_SECONDS

if TYPE_CHECKING:
    from flat_tokens.stores.store import Store

CONNECTIONS = 64
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 300.0
"""For the data of one request, which is mostly a part of an object."""


def client_options(url: str) -> dict[str, Any]:
    """Settings of a store's client, unless fsspec's configuration has others: it waits no longer than a time limit, retries a
    few times by itself, and caches no listings, because others write too.
    """
    protocol, options = url.partition("://")[0], dict[str, Any]()
    if protocol in ("s3", "s3a"):
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENCE_SECONDS}
        retries = {"mode": "standard", "total_max_attempts": 3}
        # Its client would ask for ten ranges at a time.
        config = {"max_pool_connections": CONNECTIONS, "retries": retries, **waits}
        options = {"config_kwargs": config, "use_listings_cache": False}
    elif protocol in ("gs", "gcs", "http", "https"):
        import aiohttp  # only the clients of these protocols need it

        waiting = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        if protocol in ("http", "https"):
            options = {"client_kwargs": {"timeout": waiting}}
        else:
            options = {"requests_timeout": waiting, "use_listings_cache": False}
    configured = fsspec.config.conf.get(protocol, {})
    return {
        name: {**ours, **configured.get(name, {})} if isinstance(ours, dict) else configured.get(name, ours)
        for name, ours in options.items()
    }


class RemoteSink:
    """An object kept in memory or, if it is large, on a local disk until it is complete; then uploaded."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._held = bytearray()
        self._file: Any = None

    def write(self, data: memoryview) -> None:
        if self._file is None and len(self._held) + len(data) > WRITE_BUFFER_BYTES:
            if self._store.staging:
                make_directory(Path(self._store.staging))
            self._file = tempfile.NamedTemporaryFile(dir=self._store.staging, prefix=".upload.")  # noqa: SIM115  # see discard()
            self._file.write(self._held)
            self._held.clear()
        if self._file is None:
            self._held += data
        else:
            with named_errors(Path(self._file.name)):
                self._file.write(data)

    def commit(self) -> None:
        try:
            if self._file is None:
                self._store.ask("pipe_file", self._key, bytes(self._held))
            else:
                with named_errors(Path(self._file.name)):
                    self._file.flush()
                self._store.upload(self._key, self._file.name)
        finally:
            self.discard()

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
