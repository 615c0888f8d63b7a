"""Markdown for the Prefect UI: blocks, tables, places, and text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from flat_tokens.tools.terminal import markdown as as_markdown


def page(*blocks: str | list[str]) -> str:
    """Markdown of blocks, each a text or its lines, with an empty line between two. Empty blocks are left out."""
    return "\n\n".join("\n".join([block] if isinstance(block, str) else block) for block in blocks if block) + "\n"


def table(heads: str, rows: Iterable[Sequence[str | int]]) -> list[str]:
    """Lines of a table in Markdown. *heads* stand between bars; # is before that of a column of numbers."""
    columns = heads.split(" | ")
    return [
        f"| {heads.replace('#', '')} |",
        f"|{'|'.join('---:' if column.startswith('#') else '---' for column in columns)}|",
        *("|" + "".join(f"{f' {cell:,}' if isinstance(cell, int) else f' {cell}'.rstrip()} |" for cell in row) for row in rows),
    ]


def link(location: str) -> str:
    """A place in Markdown: a link where a browser can follow it, else the place itself."""
    scheme, _, path = quote(location, safe="/:@?&=+,~*#%").partition("://")
    match scheme:
        case "http" | "https":
            return f"[{as_markdown(location)}]({scheme}://{path})"
        case "hf" if repository := re.match(r"datasets/[^/@]+/[^/@]+", path):
            return f"[{as_markdown(location)}](https://huggingface.co/{repository[0]})"
        case "gs" | "gcs":
            return f"[{as_markdown(location)}](https://console.cloud.google.com/storage/browser/{path})"
        case "s3" | "s3a":
            bucket, _, prefix = path.partition("/")
            url = f"https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={prefix.rstrip('/')}/"
            return f"[{as_markdown(location)}]({url})"
    return code(location)


def code(text: str) -> str:
    """Text as it is, whatever it holds; no line of a table ends in it."""
    return f"`{as_markdown(text)}`"
