"""The room that a build needs on the disk of a local output, compared with the room that there is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import size
from tasks.models import Slice
from tasks.tokenize.engines import Encode

logger = logging.getLogger(__name__)


def existing(root: Store) -> Path:
    """The output's directory, or the nearest above it that is there."""
    output = Path(root.root)
    return next(path for path in (output, *output.parents) if kind_of(path) is not None)


def free_space(root: Store) -> int | None:
    """Bytes free where the output is written, if it is a local disk."""
    return shutil.disk_usage(existing(root)).free if root.is_local else None


def lack_of_room(root: Store, needed: int, free: int | None) -> str | None:
    """A warning with both figures if a build needs more bytes than are free. None if there is room, or nobody knows."""
    if free is None or needed <= free:
        return None
    return (
        f"{root.url}: the build needs about {size(needed)}, and {size(free)} are free on its disk. Make room (python -m flows gc "
        f"{root.url} lists what may be removed), or choose another output."
    )


def warn_of_room(root: Store, missing: Sequence[Slice], encode: Encode, sample: Callable[[], Iterable[str]]) -> None:
    """Warn if the tokens of the *missing* slices need more room than there is, as a sample of their texts says. The sample is
    read only if this many bytes could be too many tokens.
    """
    free, text_bytes = free_space(root), sum(slice_.text_bytes for slice_ in missing)
    if free is None or TOKEN_BYTES * text_bytes <= free:
        return
    texts = [*sample()]
    sampled = sum(len(text.encode()) for text in texts)
    if not sampled:
        return
    tokens = len(encode(pa.array(texts, pa.large_string())).ids) / sampled * text_bytes
    if warning := lack_of_room(root, round(TOKEN_BYTES * tokens), free):
        logger.warning(warning)
