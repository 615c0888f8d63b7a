"""Errors that are told in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


EXPECTED = (ValueError, OSError, ImportError)
"""What bad input, a full disk or an absent package raise: told in one line. Anything else is a fault of ours: a traceback."""

FOREIGN = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "httpx", "huggingface_hub", "requests", "s3fs")
"""Libraries of stores and the hub: what they raise is mostly about the network, a name or a right, and told in one line too."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
