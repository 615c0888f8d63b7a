"""Compare-and-swap of an object, on local disks and on object stores: no change of a record is lost."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from flat_tokens.stores import signing
from flat_tokens.stores.retry import persist, status_of
from flat_tokens.stores.signing import SIGNATURE, Statement
from flat_tokens.stores.store import Store, read_record

R = TypeVar("R")


def read_if_there(root: Store, key: str) -> bytes | None:
    """The bytes of a record; None if there is none. One request to a store."""
    try:
        return read_record(root, key)
    except FileNotFoundError:
        return None


class ObjectState(NamedTuple):
    """An object as it was: its bytes, None if there was none, and the store's own name for that state."""

    data: bytes | None
    state: str | None


def read_state(root: Store, key: str) -> ObjectState:
    """Read an object, to compare it with when it is swapped."""
    try:
        # The state before the bytes: of an object that changes in between, a swap fails instead of undoing the change.
        info = {} if root.is_local else root.info(key)
        state = next((str(info[name]) for name in ("generation", "ETag", "etag") if info.get(name)), None)
        return ObjectState(read_record(root, key), state)
    except FileNotFoundError:
        return ObjectState(None, None)


def compare_and_swap(
    root: Store, key: str, parse: Callable[[bytes | None], R], after: Callable[[R], R], write: Callable[[R], bytes]
) -> tuple[R, R]:
    """Compare-and-swap a record with ``after(record)``. Return it as it was and as it is. Retried when another process was first;
    *after* raises if that makes the change wrong. *parse* gets None if there is no object.
    """
    while True:
        seen = read_state(root, key)
        before = parse(seen.data)
        now = after(before)
        if now == before or swap(root, key, seen, write(now)):
            return before, now


def sign(root: Store, record: str, said: Statement) -> None:
    """Add a statement to those next to a record, to which other processes may add theirs."""
    compare_and_swap(
        root, record + SIGNATURE, lambda lines: lines or b"", lambda lines: signing.with_statement(lines, said), bytes
    )


_swapping = threading.Lock()

REFUSED = (409, 412)
"""Statuses with which stores refuse a write to an object that is not as it was seen."""


def swap(root: Store, key: str, seen: ObjectState, data: bytes) -> bool:
    """Replace an object if it still is what was *seen*. Return whether it was replaced. Local callers hold a lock.

    S3, Google Cloud Storage and Azure compare and write in one step. On other remote stores, the object is compared right
    before and right after the write.
    """
    if root.is_local:
        root.put(key, data)
        return True
    if place := signing.place_of(root.path(key)):  # signed first, next to what other processes are about to write
        sign(root, key, signing.of_record(place, data))
    tried = False

    def try_once() -> bool:
        nonlocal tried
        if (now := read_if_there(root, key)) != seen.data:
            return tried and now == data
        tried = True
        try:
            if _write_if(root, key, seen, data):
                return True
        except Exception as error:
            # Refused, or done and its acknowledgement lost, so that the second try found the first one's work.
            if (now := read_if_there(root, key)) != seen.data:
                return now == data
            if status_of(error) in REFUSED:
                return False
            if getattr(error, "errno", None) != errno.ENOSYS:  # an S3 server that knows no conditions
                raise
            root.put(key, data)
        return read_if_there(root, key) == data

    with _swapping:
        return persist(try_once, (root / key).url, root.patience)


def _write_if(root: Store, key: str, seen: ObjectState, data: bytes) -> bool:
    """Write an object. Return whether the store checked in the same step that the object was as it was seen."""
    fs, path = root.fs, root.path(key)
    if seen.data is None and {"s3", "gs", "abfs", "memory"} & root.protocols:
        fs.pipe_file(path, data, mode="create")
    elif seen.state and "s3" in root.protocols:
        fs.pipe_file(path, data, IfMatch=seen.state)
    elif seen.state and "abfs" in root.protocols:
        fs.pipe_file(path, data, headers={"If-Match": seen.state})
    elif seen.state and "gs" in root.protocols:
        bucket, name, _ = fs.split_path(path)
        # As gcsfs uploads small objects, but for the condition, for which it has no parameter.
        fs.call(
            "POST",
            f"{fs._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="media",
            name=name,
            ifGenerationMatch=seen.state,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
        )
    else:
        root.put(key, data)
        return False
    return True
