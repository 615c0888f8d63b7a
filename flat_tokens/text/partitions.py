"""Columns that the names of directories give: Hive's form, ``lang=en/part-0.parquet``."""

from __future__ import annotations

from urllib.parse import unquote

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a directory's name that stands for none."""


def partitions_of(name: str) -> dict[str, str | None]:
    """The columns of a file's name below its source, by the directories in it: their values as text, percent-decoded; None for
    NULL. Of two directories with one key the inner one counts.
    """
    if "=" not in name:
        return {}
    pairs = (directory.partition("=") for directory in name.split("/")[:-1])
    return {unquote(key): None if value == NULL else unquote(value) for key, is_one, value in pairs if key and is_one}
