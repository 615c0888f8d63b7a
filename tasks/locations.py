"""Locations: paths and URLs from outside, checked once, by one type."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
)

SCHEMES = ("file", "local", "http", "https", "gs", "gcs", "s3", "s3a", "hf", "memory")
NEED_A_HOST = ("http", "https", "gs", "gcs", "s3", "s3a")
SECRET_PARAMETERS = re.compile(r"token|secret|signature|password|credential|apikey|api_key|^sig$|^key$", re.I)


def plain_location(location: str) -> str:
    """Refuse a location that must not stand in a run's parameters, or cannot be one."""
    if not location.strip() or "\0" in location:
        raise ValueError(f"{location!r} is not a path or URL")
    if "::" in location:
        raise ValueError("chained URLs ('::') are not accepted; name the file itself")
    if re.search(r"(^|/)(?!\.{1,2}/)[^/:]+/\.\.(/|$)", location):
        raise ValueError(f"{location} goes down and up again ('..'); write where it leads")
    parts = urlsplit(location)
    if "://" in location and parts.scheme not in SCHEMES:
        raise ValueError(f"{location.partition('://')[0]}:// is not known here; {', '.join(SCHEMES)} are")
    if parts.scheme in NEED_A_HOST and not parts.netloc:
        raise ValueError(f"{location} names no {'server' if parts.scheme.startswith('http') else 'bucket'}")
    if "@" in parts.netloc and parts.scheme not in ("", "hf"):
        raise ValueError(
            f"the URL of {parts.hostname} carries credentials. Parameters are shown in plain text: use ambient credentials "
            "(environment, instance role) instead."
        )
    if secrets := [name for name, _ in parse_qsl(parts.query) if SECRET_PARAMETERS.search(name)]:
        raise ValueError(f"the URL of {parts.hostname} is signed ({secrets[0]}). Use ambient credentials instead.")
    return location


INPUT_ROOTS, OUTPUT_ROOTS = "FLAT_TOKENS_INPUT_ROOTS", "FLAT_TOKENS_OUTPUT_ROOTS"
"""Environment variables of the workers: paths and URLs, with commas between them, to which the reads and writes of
all runs are bound. Writing includes reading. Without a variable there is no such bound.
"""


def readable(location: str) -> str:
    """Refuse a location outside of the roots for input, where the operator has set any."""
    return _within(location, "read", INPUT_ROOTS, OUTPUT_ROOTS)


def writable(location: str) -> str:
    """Refuse a location that cannot be written, or lies outside of the roots for output, where the operator has set any."""
    if location.startswith(("http://", "https://")):
        raise ValueError("nothing can be written to http; name a directory or an object store, such as gs://bucket/path")
    return _within(location, "written", OUTPUT_ROOTS)


def _within(location: str, verb: str, variable: str, *more: str) -> str:
    if not os.environ.get(variable):
        return location
    listed = ",".join(os.environ.get(name, "") for name in (variable, *more))
    roots = [root.strip() for root in listed.split(",") if root.strip()]
    store, path = place_of(location)
    for root in map(place_of, roots):
        if root[0] == store and os.path.commonpath([root[1], path]) == root[1]:
            return location
    raise ValueError(
        f"{location} may not be {verb} here: {variable} allows {', '.join(roots)}. Ask who runs the workers for more."
    )


def _path(value: Any) -> Any:
    return plain_location(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


Location = Annotated[str, BeforeValidator(_path), AfterValidator(readable)]
Output = Annotated[str, BeforeValidator(_path), AfterValidator(writable)]


def local_path(location: str) -> str | None:
    """The path of a location on this machine; None where it is elsewhere."""
    path = location.removeprefix("file://").removeprefix("local://")
    return None if "://" in path else os.path.expanduser(path)


def place_of(location: str) -> tuple[str, str]:
    """The store of a location and its path there; links of a local one are resolved."""
    path = local_path(location)
    if path is not None:
        return "", os.path.realpath(path)
    scheme, _, rest = location.partition("://")
    return {"gcs": "gs", "s3a": "s3"}.get(scheme, scheme), posixpath.normpath("/" + rest.lstrip("/"))
