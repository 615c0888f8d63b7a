"""Packed bytes, and pointers to files that were not fetched: how each begins."""

from __future__ import annotations

import re
from pathlib import PurePath

LZ4 = rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18"
ZSTD, SKIPPABLE = b"\x28\xb5\x2f\xfd", rb"[\x50-\x5f]\x2a\x4d\x18"

BEGINS: dict[str, bytes] = {
    ".gz": rb"\x1f\x8b",
    ".zst": rb"\x28\xb5\x2f\xfd|" + SKIPPABLE,
    ".bz2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    ".xz": rb"\xfd7zXZ\x00",
}
"""The compressions that are read, by the ending of their files: a pattern of how these begin."""

FOREIGN: dict[str, tuple[bytes, str]] = {
    ".lz4": (LZ4, "lz4 -d"),
    ".zip": (rb"PK(?:\x03\x04|\x05\x06|\x07\x08)", "unzip"),
    ".7z": (rb"7z\xbc\xaf\x27\x1c", "7z x"),
    ".rar": (rb"Rar!\x1a\x07", "unrar x"),
    ".z": (rb"\x1f[\x9d\xa0]", "gzip -d"),
    ".lzma": (rb"\x5d\x00\x00[\s\S]{2}(?:\xff{8}|[\s\S]{5}\x00\x00\x00)", "xz -d"),
    ".lz": (rb"LZIP[\x00\x01]", "lzip -d"),
    ".lzo": (rb"\x89LZO\x00", "lzop -d"),
    ".sz": (rb"\xff\x06\x00\x00sNaPpY", "snzip -d"),
    ".snappy": (rb"(?!)", "snzip -d"),
    ".br": (rb"(?!)", "brotli -d"),
}
"""Compressions and archives that are not read, by the ending of their files: a pattern of how these begin, and the command that
unpacks them.
"""

POINTERS: dict[str, tuple[bytes, str]] = {
    "Git LFS": (rb"version https?://(?:git-lfs|hawser)\.github\.com/spec/v", "git lfs pull"),
    "git-annex": (rb"/annex/objects/", "git annex get ."),
}
"""Programs that leave a pointer in place of a file until it is fetched: how a pointer begins, and the command that fetches."""
POINTER_BYTES = 1024
"""A pointer is shorter."""

# One pattern for all: a source may have many small files.
_COMPRESSED = re.compile(b"|".join(BEGINS.values()))
_NOT_CONTENT = re.compile(b"|".join(begins for begins, _ in (*POINTERS.values(), *FOREIGN.values())))


def packed_as(head: bytes) -> str | None:
    """The ending of the compression whose files begin like *head*; None if no known one does."""
    if not _COMPRESSED.match(head):
        return None
    return next(ending for ending, begins in BEGINS.items() if re.match(begins, head))


def refuse_foreign(head: bytes, name: str) -> None:
    """ValueError if a file is packed in a way that is not read, or is a pointer to a file that was not fetched."""
    if not _NOT_CONTENT.match(head):
        return
    for program, (begins, remedy) in POINTERS.items():
        if len(head) < POINTER_BYTES and re.match(begins, head):
            raise ValueError(f"{name} is a pointer of {program}, not the file itself. Fetch the file: {remedy}")
    for ending, (begins, remedy) in FOREIGN.items():
        if re.match(begins, head):
            raise ValueError(
                f"{name} is packed as {ending}, which is not read here. Unpack it first: {remedy} {PurePath(name).name}"
            )
