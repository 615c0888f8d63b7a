"""Doubts: marks at an output of tokenizers whose fast engine gave a build other tokens than the reference engine.

Token shards that were stored before do not say which engine made them. Where there is a doubt, builds with the reference engine
take none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flat_tokens.stores.store import Store
from tasks.output.paths import CACHE
from tasks.tokenize.engines import EnginesDifferError


def _mark(digest: str) -> str:
    return f"{CACHE}/{digest}.doubt"


@contextlib.contextmanager
def noting_doubts(root: Store, digest: str) -> Iterator[None]:
    """Note where the engines of the tokenizer with this digest differ within the block."""
    try:
        yield
    except EnginesDifferError:
        root.put(_mark(digest), b"")  # the error shows text of a document, which may have to be forgotten
        raise


def is_doubted(root: Store, digest: str) -> bool:
    """Whether engines of the tokenizer with this digest have differed at this output."""
    return root.has(_mark(digest))
