"""Signatures of records: HMACs in a file next to each, by a key that who can write to a store need not have."""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import re
import shlex
import stat
from collections.abc import Iterator

KEY_FILE = "FLAT_TOKENS_SIGNING_KEY_FILE"
SIGNATURE = ".hmac"

SIGNED = re.compile(
    r"(?:.*?/)??(latest\.json|held\.json|forgotten/[^/]+\.json|(?:versions/[^/]+/)?(?:manifest|token_bytes)\.json|(?:_cache/[^/]+/)?receipt\.json"
    r"|_groups/[^/]+/[^/]+\.json|origins/[^/]+\.json|_cache/index/[^/]+\.json|(?:_cache/)?files/[0-9a-f]{64}\.(?:json|table))",
    re.DOTALL,  # an output's own path may have any character
)
"""Paths of the records that decide about tokens. The group is a record's place below its output."""

_used: tuple[bytes, ...] | None = None


def keys() -> tuple[bytes, ...]:
    """The accepted keys; the first one signs. PermissionError where they cannot be had: that is not a fault of a record."""
    path = os.environ.get(KEY_FILE)
    return _used if _used is not None else _keys_in(path) if path is not None else ()


@functools.cache
def _keys_in(path: str) -> tuple[bytes, ...]:
    return keys_of(secret_in(path, KEY_FILE).decode(errors="replace"), f"{KEY_FILE}={path}")


def secret_in(path: str, setting: str) -> bytes:
    """The content of a key's file, which *setting* names. PermissionError if it cannot be read, or if others can read it."""
    if not path:
        raise PermissionError(f"{setting} is empty. Name the file of the key, or unset it.")
    try:
        with open(path, "rb") as file:
            data, status = file.read(), os.fstat(file.fileno())
    except OSError as error:  # one of reading, unlike one of opening, names no path
        raise PermissionError(
            f"{setting}={path} cannot be read ({error.strerror}). Restore the file, or name another."
        ) from error
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        raise PermissionError(
            f"{setting}={path} can be read or written by others. Make a new key, and: chmod 600 {shlex.quote(path)}"
        )
    return data


def keys_of(text: str, where: str) -> tuple[bytes, ...]:
    """The keys in a text, one a line. PermissionError, which names *where* and shows no key, where it is another text."""
    if not text.split() or not all(re.fullmatch("(?:[0-9a-fA-F]{2}){32,}", line) for line in text.split()):
        raise PermissionError(f"{where} has no keys of 64 or more hexadecimal digits, one a line. Make one: openssl rand -hex 32")
    return tuple(map(bytes.fromhex, text.split()))


@contextlib.contextmanager
def using(these: tuple[bytes, ...]) -> Iterator[None]:
    """Use these keys in the block, in all threads, whatever the environment says."""
    global _used
    before, _used = _used, these
    try:
        yield
    finally:
        _used = before


def use(these: tuple[bytes, ...]) -> None:
    """Use these keys in this process from now on, whatever the environment says."""
    global _used
    _used = these


def place_of(path: str) -> str | None:
    """The place below its output of the record at *path*, if a key is set and such records are signed."""
    found = SIGNED.fullmatch(path)
    return found[1] if found and keys() else None


def sign(key: bytes, place: str, data: bytes) -> bytes:
    """The line that signs a record's bytes and its place."""
    made = hmac.digest(key, b"flat-tokens record\0%b\0%b" % (place.encode(), data), "sha256")
    return f"{made.hex()}  {place}".encode()


def with_signature(lines: bytes, place: str, data: bytes) -> bytes:
    """The content of the file next to a record that is to have *data*: its own, then those of what others read or write."""
    own = sign(keys()[0], place, data)
    return b"\n".join([own, *(line for line in lines.splitlines() if line != own)])[:4095] + b"\n"


def is_signed(lines: bytes, place: str, data: bytes) -> bool:
    """Whether one of *lines* signs *data* at *place*. A copy outside of an output may come from any place of its kind."""
    named = ((line, line.partition(b"  ")[2].decode(errors="replace")) for line in lines.splitlines())
    right = [(line, there) for line, there in named if place in (there, there.rpartition("/")[2])]
    return any(hmac.compare_digest(sign(key, there, data), line) for line, there in right for key in keys())
