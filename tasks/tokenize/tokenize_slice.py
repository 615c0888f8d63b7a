"""A slice of a source file to token batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from flat_tokens.batch import TokenBatch
from tasks.config import DocumentPolicy, Source
from tasks.models import Slice
from tasks.text.documents import Documents, Tally, bad_document, read_documents
from tasks.tokenize.engines import Engine, Tokens, UnencodableError, concatenate


def token_batches(
    slice_: Slice, source: Source, policy: DocumentPolicy, engine: Engine, tally: Tally
) -> Iterator[tuple[TokenBatch, Documents]]:
    """The tokens of a slice with their documents, a batch at a time; *tally* counts along.

    A document that the engine does not take is a bad document: ValueError, or left out and counted.
    """
    for batch in read_documents(slice_, source, policy, tally):
        try:
            taken, (ids, offsets) = batch, engine(batch.texts)
        except UnencodableError:
            taken, (ids, offsets) = _encodable(batch, slice_, source, policy, engine, tally)
        yield TokenBatch.from_flat(ids if ids.flags.writeable else ids.copy(), offsets.astype(np.uint64)), taken


def _encodable(
    batch: Documents, slice_: Slice, source: Source, policy: DocumentPolicy, engine: Engine, tally: Tally
) -> tuple[Documents, Tokens]:
    """Those documents of a batch that the engine takes, with their tokens, once it has refused the batch."""
    keep, taken = np.ones(len(batch.texts), bool), []
    for i, tokens in enumerate(engine.one_by_one(batch.texts)):
        if not isinstance(tokens, str):
            taken.append(tokens.ids)
            continue
        if policy.on_bad == "error":
            raise bad_document(slice_, source, int(batch.rows[i]), "unencodable", tokens)
        keep[i] = False
        tally.written -= 1
        tally.skipped["unencodable"] += 1
        tally.text_bytes -= len(batch.texts[i].as_buffer())
    return Documents(batch.texts.filter(pa.array(keep)), batch.keys[keep], batch.rows[keep]), concatenate(taken)
