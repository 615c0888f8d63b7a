"""Lists of documents: files of keys, or of ids."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.formats.contract import file_at
from flat_tokens.keys import document_keys
from tasks.derive.pieces import found_beside

HEXADECIMAL = re.compile(rb"(0x)?[0-9a-fA-F]{16}")


class Listed(NamedTuple):
    """Sorted keys, each once: uint64[n]."""

    keys: npt.NDArray[np.uint64]

    def facts(self) -> dict[str, object]:
        """The record of the list in a manifest."""
        return {"count": len(self.keys), "sha256": hashlib.sha256(self.keys.astype("<u8").tobytes()).hexdigest()}

    def save(self, path: Path) -> None:
        """Save the keys for the tasks, and beside them a file that notes which ones were found."""
        np.save(path, self.keys)
        found_beside(path).write_bytes(bytes(len(self.keys)))


def read_keys(path_or_url: str) -> Listed:
    """Keys from a file: uint64 in an ``.npy``, or text with 16 hexadecimal digits a line.

    ValueError, naming the line, where it is something else.
    """
    data = _read(path_or_url)
    if data.startswith(b"\x93NUMPY"):
        keys = np.load(io.BytesIO(data), allow_pickle=False)
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ValueError(f"{path_or_url}: holds {keys.dtype} of shape {keys.shape}, but keys are uint64 in one dimension")
        return Listed(np.unique(keys))
    lines = data.split()
    for number, line in enumerate(lines, 1):
        if not HEXADECIMAL.fullmatch(line):
            raise ValueError(
                f"{path_or_url}: item {number} is {line[:40].decode(errors='replace')!r}, but a key is 16 hexadecimal digits, as "
                "flat-tokens trace shows it. For ids, use --ids."
            )
    together = b"".join(line[-16:] for line in lines)
    return Listed(np.unique(np.frombuffer(bytes.fromhex(together.decode()), ">u8").astype(np.uint64)))


def read_ids(path_or_url: str) -> Listed:
    """The keys of the ids in a text file, one a line. Empty lines are skipped."""
    ids = [line for line in (line.removesuffix(b"\r") for line in _read(path_or_url).split(b"\n")) if line]
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(one) for one in ids], out=offsets[1:])
    return Listed(np.unique(document_keys(np.frombuffer(b"".join(ids), np.uint8), offsets)))


def _read(path_or_url: str) -> bytes:
    store, key = file_at(path_or_url)
    return store.read(key)
