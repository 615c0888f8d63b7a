"""Credentials of stores that are not ambient, and keys that sign: in a Secret block of Prefect's, of which runs know the name.

The block holds JSON, fsspec's options by protocol: ``{"s3": {"key": ..., "secret": ...}, "gs": {"token": {...}}}``, and the
keys as ``{"signing": {"keys": "..."}}``. Its name is in the environment of the runs, which is set when deployments are
registered, not when a run is started. Its content stays in the process: it is in no parameter, log line, manifest or digest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import fsspec
from prefect.blocks.system import Secret

from flat_tokens.stores import signing
from flat_tokens.stores.store import REMOTE
from tasks.locations import CREDENTIALS

PROTOCOLS = (*REMOTE[:-1], "signing")


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """Reach stores with the block that the environment names, if it does, and sign with its keys. ValueError or PermissionError
    if it is not there, or unfit.
    """
    name = os.environ.get(CREDENTIALS)
    if not name:
        yield
        return
    options, before = options_of(name), dict(fsspec.config.conf)
    held = options.pop("signing", None)
    keys = signing.keys() if held is None else str(held.get("keys")).encode()
    if held is not None:
        signing.keys_of(keys, f"the block {name}")
    fsspec.config.conf.update({protocol: {**before.get(protocol, {}), **given} for protocol, given in options.items()})
    try:
        with signing.using(keys):
            yield
    finally:
        for protocol in options:
            del fsspec.config.conf[protocol]
        fsspec.config.conf.update(before)


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Options in the block of that name. Errors never show its content."""
    kind, _, block = name.partition("/")
    if kind != "secret" or not block:
        raise ValueError(f"{CREDENTIALS} is {name!r}, but names a Secret block of Prefect's, such as secret/buckets")
    try:
        loaded: Any = Secret.load(block, _sync=True)  # type: ignore[call-arg]
    except ValueError as error:
        raise ValueError(f"there is no block {name}, which {CREDENTIALS} names. Create it in the UI under Blocks.") from error
    options = loaded.get()
    if not isinstance(options, dict) or not all(isinstance(given, dict) for given in options.values()):
        raise ValueError(
            f"the block {name} does not hold a JSON object of options by protocol, such as " + '{"s3": {"key": ...}}'
        )
    if unknown := sorted(set(options) - set(PROTOCOLS)):
        raise ValueError(f"the block {name} has options for {', '.join(unknown)}; known are {', '.join(PROTOCOLS)}")
    return options
