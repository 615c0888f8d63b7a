"""Footers of Parquet files, parsed once: in memory one may take ten times its bytes, and a file is opened again and again."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TypeAlias

from flat_tokens.extras import pa
from flat_tokens.text.rows import TextFile

KEPT_BYTES = 8 << 20
"""Bytes of the footers that are kept, as files have them; the latest one is kept whatever its size."""

FileState: TypeAlias = "tuple[str, int, int, int, int] | None"


class Footers:
    """The footers of the files on this machine that were opened last. Threads share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[FileState, pa.parquet.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, file: TextFile) -> tuple[FileState, pa.parquet.FileMetaData | None]:
        """The state of a file now, and its footer. None where that has to be read."""
        state = _state_of(file)
        with self._lock:
            if state not in self._kept:
                return state, None
            self._kept.move_to_end(state)
            return state, self._kept[state]

    def keep(self, file: TextFile, state: FileState, footer: pa.parquet.FileMetaData) -> None:
        """Keep the footer that was read of a file after it had been in that state, if it still is."""
        if state is None or _state_of(file) != state:
            return
        with self._lock:
            self._kept[state] = footer
            self._kept.move_to_end(state)
            while len(self._kept) > 1 and sum(one.serialized_size for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)


def _state_of(file: TextFile) -> FileState:
    """The path of a file on this machine, and what changes when it is written to; None for another one."""
    if not file.is_local:
        return None
    status = os.stat(file.path)
    return (file.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


FOOTERS = Footers()
