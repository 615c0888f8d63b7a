"""Opening a shard or a part for its documents, wherever these are."""

from __future__ import annotations

import numpy as np

from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.target import Target
from tasks.parts.bucket import bucket_documents
from tasks.parts.documents import Documents, Places
from tasks.parts.input import input_documents
from tasks.parts.part import BucketPart, InputPart, Part
from tasks.parts.published import published_documents
from tasks.parts.stored import stored_documents
from tasks.parts.unfinished import unfinished_documents


def open_shard(root: Store, shard: TokenShard, *names: str) -> Documents:
    """All documents of a shard; files and rows count from the slice's first. *names*: arrays besides keys and starts that will be
    read, too.
    """
    if shard.published is not None:
        return published_documents(root, shard, shard.published)
    if shard.unfinished is not None:
        return unfinished_documents(root, shard, shard.unfinished)
    return stored_documents(root, shard, *names)


def open_part(part: Part, target: Target, *names: str) -> Documents:
    """All documents of a part, those that the version leaves out among them; files and rows as the version has them."""
    if isinstance(part, InputPart):
        return input_documents(part, target)
    if isinstance(part, BucketPart):
        return bucket_documents(part, target)
    documents = open_shard(target.root, part.shard, *names)

    def places() -> Places:
        # (slice, file, row) -> (version, file, row)
        file, row = documents.places()
        return Places(file + np.uint64(part.file), row + np.where(file == 0, np.uint64(part.first_row), np.uint64(0)))

    return documents._replace(places=places)
