"""Endorsements: ed25519 signatures of versions, in a file next to each manifest. Who has the public key alone can check them.

A line says that a version with a manifest of this digest was made, or that it became the latest of its output as the move of that
number. So an earlier version that is put back as the latest has no line of the pointer's number.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

from flat_tokens.extras import extra
from flat_tokens.options import digits
from flat_tokens.stores.signing import secret_in

PRIVATE_KEY_FILE = "FLAT_TOKENS_PRIVATE_KEY_FILE"
ENDORSED = ".ed25519"
"""Ends the name of the file of a manifest's endorsements."""
PURPOSE = "an ed25519 key"
MOST_BYTES, LINES_KEPT = 1 << 16, 200
"""Of a file of endorsements: what is read, and the lines that are kept, the first and the newest."""

Kind = Literal["made", "offered", "latest"]
"""``offered``: before the pointer moves; ``latest``: when it has."""

_used: Any = None


class Endorsement(NamedTuple):
    """A line of the file. ``number``: the pointer's sequence number; 0 of what was made."""

    kind: Kind
    number: int
    version: str
    manifest_sha256: str

    def statement(self) -> bytes:
        """The bytes that are signed."""
        return "\0".join(["flat-tokens version", self.kind, str(self.number), self.version, self.manifest_sha256]).encode()


def private_key() -> Any:
    """The key that endorses; None where none is set. PermissionError where it cannot be had."""
    if _used is not None:
        return _used
    path = os.environ.get(PRIVATE_KEY_FILE)
    return None if path is None else _key_in(path)


@functools.cache
def _key_in(path: str) -> Any:
    return private_key_of(secret_in(path, PRIVATE_KEY_FILE), f"{PRIVATE_KEY_FILE}={path}")


def private_key_of(data: bytes, where: str) -> Any:
    """The key in PEM. PermissionError, which names *where* and shows nothing of it, where it is something else."""
    serialization, ed25519 = _libraries()
    remedy = "Make one: openssl genpkey -algorithm ed25519 -out KEY"
    try:
        read = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
        key = read(data, None)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise PermissionError(f"{where} has no private key without a passphrase. {remedy}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise PermissionError(f"{where} has a key of another kind than ed25519. {remedy}")
    return key


def public_key_in(path: str) -> Any:
    """The public key in a file: PEM, or a line as ssh-keygen writes it. ValueError where it is something else."""
    serialization, ed25519 = _libraries()
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES)
    except OSError as error:
        raise ValueError(f"--key {path} cannot be read ({error.strerror})") from error
    try:
        read = serialization.load_ssh_public_key if data.startswith(b"ssh-") else serialization.load_pem_public_key
        key = read(data)
    except (ValueError, TypeError, NotImplementedError):
        key = None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        remedy = "Of a private one it is made by: openssl pkey -in KEY -pubout -out PUBLIC"
        raise ValueError(f"--key {path} has no public ed25519 key. {remedy}")
    return key


def _libraries() -> tuple[Any, Any]:
    primitives = "cryptography.hazmat.primitives"
    return extra(f"{primitives}.serialization", PURPOSE), extra(f"{primitives}.asymmetric.ed25519", PURPOSE)


@contextmanager
def using(key: Any) -> Iterator[None]:
    """Endorse with this key in the block, in all threads, whatever the environment says."""
    global _used
    before, _used = _used, key
    try:
        yield
    finally:
        _used = before


def line_of(endorsement: Endorsement, key: Any) -> bytes:
    """The line that endorses something."""
    made = key.sign(endorsement.statement()).hex()
    return " ".join([made, *map(str, endorsement)]).encode()


def with_endorsement(lines: bytes, endorsement: Endorsement, key: Any) -> bytes:
    """The content of a file of endorsements with one more: its lines, of which the first and the newest ones are kept."""
    fresh = line_of(endorsement, key)
    known = [line for line in lines.splitlines() if line != fresh]
    first = [line for line in known if line.split(b" ")[1:2] == [b"made"]][-1:]
    others = [line for line in known if line not in first]
    return b"\n".join([*first, *[*others, fresh][-LINES_KEPT:]]) + b"\n"


def endorsements_in(lines: bytes, public: Any) -> list[Endorsement]:
    """The statements that the key has signed."""
    found = []
    for line in lines[:MOST_BYTES].splitlines():
        parts = line.decode(errors="replace").split(" ")
        if len(parts) != 5 or parts[1] not in get_args(Kind) or (number := digits(parts[2])) is None:
            continue
        said = Endorsement(parts[1], number, parts[3], parts[4])  # type: ignore[arg-type]
        try:
            public.verify(bytes.fromhex(parts[0]), said.statement())
        except Exception:  # noqa: BLE001, S112  of the library's own, or digits that are none: it is not signed
            continue
        found.append(said)
    return found
