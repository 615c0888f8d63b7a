"""What a table of tests does to JSON that is right: rows are data, or functions."""

import json
import os
from pathlib import Path
from typing import Any


def change(value: Any, row: Any) -> None:
    """Change JSON in place. The values of a mapping are set, or merged into mappings and lists, whose items its numbers name. A
    function is called with the JSON.
    """
    if callable(row):
        row(value)
        return
    for key, one in row.items():
        inner = value[key] if isinstance(value, list) else value.get(key)
        if isinstance(one, dict) and isinstance(inner, list if one and set(map(type, one)) == {int} else dict):
            change(inner, one)
        else:
            value[key] = one


def change_file(path: Path, row: Any) -> None:
    """Change the JSON in a file."""
    value = json.loads(path.read_bytes())
    change(value, row)
    path.write_text(json.dumps(value))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, content: bytes | None = None) -> None:
    """Write other content of the same length, or the same bytes in reverse. The times stay as they were."""
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1] if content is None else content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
