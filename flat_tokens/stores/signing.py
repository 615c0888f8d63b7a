"""Signatures of records: statements that ed25519 keys have signed, in a file next to each record.

A statement says which bytes a record has, by their digest, or that a version became the latest of its output as the move of that
number. So no record is accepted in another's place, and an earlier version that is put back as the latest has no statement of the
pointer's number. Who has a public key alone can check them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from flat_tokens.extras import extra

KEY_FILE = "FLAT_TOKENS_SIGNING_KEY_FILE"
FORMER_KEY_FILE = "FLAT_TOKENS_PRIVATE_KEY_FILE"
SIGNATURE = ".ed25519"
"""Ends the name of the file of a record's statements."""
REMEDY = "Make one: openssl genpkey -algorithm ed25519 -out KEY"
MOST_BYTES, LINES_KEPT = 1 << 17, 100
"""Of a file of statements: what is read, and the lines of each kind that are kept, the newest."""

SIGNED = re.compile(
    r"(?:.*?/)??(latest\.json|forgotten/[^/]+\.json|(?:versions/[^/]+/)?(?:manifest|token_bytes)\.json|(?:_cache/[^/]+/)?receipt\.json"
    r"|_groups/[^/]+/[^/]+\.json|origins/[^/]+\.json|_cache/index/[^/]+\.json|(?:_cache/)?files/[0-9a-f]{64}\.(?:json|table))",
    re.DOTALL,  # an output's own path may have any character
)
"""Paths of the records that decide about tokens. The group is a record's place below its output."""

KEYS = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----|^ssh-ed25519 .*?$", re.DOTALL | re.MULTILINE)

Kind = Literal["record", "offered", "latest"]
"""``offered``: before the pointer moves; ``latest``: when it has."""

LINE = re.compile(rf"([0-9a-f]{{128}}) ({'|'.join(get_args(Kind))}) ([0-9]{{1,18}}) (.+) ([0-9a-f]{{64}})")

_used: bytes | None = None


class Statement(NamedTuple):
    """A line of the file. ``number``: the pointer's sequence number, 0 of a record. ``name``: a record's place, or a version."""

    kind: Kind
    number: int
    name: str
    sha256: str

    def line(self, key: Any) -> bytes:
        """The line by which a private key signs it."""
        return " ".join([key.sign(self.signed()).hex(), *map(str, self)]).encode()

    def signed(self) -> bytes:
        """The bytes that are signed."""
        return "\0".join(["flat-tokens", *map(str, self)]).encode()


class Keys(NamedTuple):
    """The keys of a file: the first private one signs; every one, and those that belong to private ones, is accepted."""

    private: Any | None
    public: tuple[Any, ...]


def keys() -> bytes:
    """The text of the keys; empty if none is set. PermissionError if they cannot be read: the records may still be right."""
    if _used is not None:
        return _used
    path = os.environ.get(KEY_FILE)
    if path is None and FORMER_KEY_FILE in os.environ:
        raise PermissionError(f"{FORMER_KEY_FILE} is not used any more: one key signs everything. Name its file in {KEY_FILE}.")
    return b"" if path is None else _text_in(path)


@functools.cache
def _text_in(path: str) -> bytes:
    """The keys in a file. PermissionError if it has none, if it cannot be read, or if other users can write it, or read a
    private key.
    """
    if not path:
        raise PermissionError(f"{KEY_FILE} is empty. Name the file of the key, or unset it.")
    try:
        with open(path, "rb") as file:
            data, status = file.read(), os.fstat(file.fileno())
    except OSError as error:  # one of reading, unlike one of opening, names no path
        raise PermissionError(
            f"{KEY_FILE}={path} cannot be read ({error.strerror}). Restore the file, or name another."
        ) from error
    parsed = keys_of(data, f"{KEY_FILE}={path}")
    if stat.S_ISREG(status.st_mode) and status.st_mode & (0o022 if parsed.private is None else 0o077):
        raise PermissionError(
            f"{KEY_FILE}={path} can be read or written by others. Make a new key, and: chmod 600 {shlex.quote(path)}"
        )
    return data


@functools.cache
def keys_of(text: bytes, where: str = KEY_FILE) -> Keys:
    """The keys in a text, in PEM or as ssh-keygen writes them. PermissionError, which names *where* and shows no key, if it
    has none, or something else.
    """
    found = [match[0] for match in KEYS.finditer(text)]
    if not found or KEYS.sub(b"", text).strip():
        raise PermissionError(f"{where} has no ed25519 keys in PEM alone, or as ssh-keygen writes them. {REMEDY}")
    read = [_key(one, where) for one in found]
    private = [key for key in read if hasattr(key, "sign")]
    return Keys(private[0] if private else None, tuple(key.public_key() if key in private else key for key in read))


def _key(data: bytes, where: str) -> Any:
    """The ed25519 key in *data*. PermissionError if it cannot be read, or is of another kind."""
    primitives, purpose = "cryptography.hazmat.primitives", "an ed25519 key"
    serialization, ed25519 = (extra(f"{primitives}.{name}", purpose) for name in ("serialization", "asymmetric.ed25519"))
    form = "ssh" if b"OPENSSH" in data or data.startswith(b"ssh-") else "pem"
    try:
        if b"PRIVATE" in data:
            key = getattr(serialization, f"load_{form}_private_key")(data, None)
        else:
            key = getattr(serialization, f"load_{form}_public_key")(data)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise PermissionError(f"{where} has a key that cannot be read; it may have a passphrase. {REMEDY}") from error
    if not isinstance(key, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
        raise PermissionError(f"{where} has a key of another kind than ed25519. {REMEDY}")
    return key


def public_key_in(path: str) -> Any:
    """The public key in a file. ValueError if it is something else."""
    try:
        with open(path, "rb") as file:
            found = keys_of(file.read(MOST_BYTES), f"--key {path}")
    except OSError as error:
        raise ValueError(f"--key {path} cannot be read ({error.strerror})" if error.strerror else str(error)) from error
    if found.private:
        raise ValueError(f"--key {path} has a private key. Its public one is made by: openssl pkey -in KEY -pubout -out PUBLIC")
    return found.public[0]


@contextlib.contextmanager
def using(text: bytes) -> Iterator[None]:
    """Use the keys in *text* in the block, in all threads, whatever the environment says."""
    global _used
    before, _used = _used, text
    try:
        yield
    finally:
        _used = before


def use(text: bytes) -> None:
    """Use the keys in *text* in this process from now on, whatever the environment says."""
    global _used
    _used = text


def place_of(path: str) -> str | None:
    """The place below its output of the record at *path*, if a key is set and such records are signed."""
    found = SIGNED.fullmatch(path)
    return found[1] if found and keys() else None


def of_record(place: str, data: bytes) -> Statement:
    """The statement that the record at a place has these bytes."""
    return Statement("record", 0, place, hashlib.sha256(data).hexdigest())


def with_statement(lines: bytes, said: Statement) -> bytes:
    """The content of the file of a record with one more statement: it has the newest lines of each kind. PermissionError if
    there are public keys only.
    """
    if (key := keys_of(keys()).private) is None:
        raise PermissionError(f"the keys of {KEY_FILE} are public: they check records and sign none. Add the private key.")
    kept, fresh = list[bytes](), said.line(key)
    for kind in get_args(Kind):
        of_kind = [line for line in lines.splitlines() if line.split(b" ")[1:2] == [kind.encode()] and line != fresh]
        kept += [*of_kind, fresh][-LINES_KEPT:] if kind == said.kind else of_kind
    return b"\n".join(kept) + b"\n"


def statements_in(lines: bytes, public: Any) -> Iterator[Statement]:
    """The statements that a key has signed."""
    for found in filter(None, map(LINE.fullmatch, lines[:MOST_BYTES].decode(errors="replace").split("\n"))):
        said = Statement(found[2], int(found[3]), found[4], found[5])  # type: ignore[arg-type]
        with contextlib.suppress(Exception):  # of the library's own: it is not signed
            public.verify(bytes.fromhex(found[1]), said.signed())
            yield said


def is_signed(lines: bytes, place: str, data: bytes) -> bool:
    """Whether a statement says that the record at *place* has *data*. A copy outside of an output may be of any place of its
    kind.
    """
    sha256 = hashlib.sha256(data).hexdigest().encode()
    mine = b"\n".join(line for line in lines.splitlines() if line.endswith(sha256))
    found = (said for key in keys_of(keys()).public for said in statements_in(mine, key))
    return any(said.kind == "record" and place in (said.name, said.name.rpartition("/")[2]) for said in found)
