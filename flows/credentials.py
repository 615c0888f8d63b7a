"""Credentials of stores that are not ambient: in a Secret block of Prefect's, of which runs know the name.

The block holds JSON, fsspec's options by protocol: ``{"s3": {"key": ..., "secret": ...}, "gs": {"token": {...}}}``. Its name
stands in the environment of the runs, which is set by who registers the deployments, not by who starts a run. What it holds
stays in the process: it is in no parameter, log line, manifest or digest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import fsspec
from prefect.blocks.system import Secret

VARIABLE = "FLAT_TOKENS_CREDENTIALS"
"""Environment variable with the block's name, such as secret/buckets."""

PROTOCOLS = ("gs", "gcs", "s3", "s3a", "http", "https", "hf")


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """Within a flow run: stores are reached with what the block holds that the environment names, if it names one.

    ValueError where there is no such block, or it holds something else.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        yield
        return
    options = options_of(name)
    before = {protocol: fsspec.config.conf.get(protocol) for protocol in options}
    for protocol, given in options.items():
        fsspec.config.conf[protocol] = {**(before[protocol] or {}), **given}
    try:
        yield
    finally:
        for protocol, was in before.items():
            if was is None:
                del fsspec.config.conf[protocol]
            else:
                fsspec.config.conf[protocol] = was


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Options in the block of that name. Errors never show its content."""
    kind, _, block = name.partition("/")
    if kind != "secret" or not block:
        raise ValueError(f"{VARIABLE} is {name!r}, but names a Secret block of Prefect's, such as secret/buckets")
    try:
        loaded: Any = Secret.load(block, _sync=True)  # type: ignore[call-arg]
    except ValueError as error:
        raise ValueError(f"there is no block {name}, which {VARIABLE} names. Create it in the UI under Blocks.") from error
    options = loaded.get()
    if not isinstance(options, dict) or not all(isinstance(given, dict) for given in options.values()):
        raise ValueError(
            f"the block {name} does not hold a JSON object of options by protocol, such as " + '{"s3": {"key": ...}}'
        )
    if unknown := sorted(set(options) - set(PROTOCOLS)):
        raise ValueError(f"the block {name} has options for {', '.join(unknown)}; known are {', '.join(PROTOCOLS)}")
    return options
