"""Evaluation sets of the step ``decontaminate``: read once, before all else, and kept next to a build's files for its workers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from flat_tokens.columns import texts_as_arrow
from flat_tokens.steps.decontaminate import Questions, index_of
from flat_tokens.stores.store import Store
from flat_tokens.text.rows import text_buffers
from tasks.config import BuildConfig, DocumentPolicy, DocumentStep, EvaluationSet, evaluation_sets
from tasks.download.cut import cut_files, local_slice
from tasks.download.slices import slices_of
from tasks.download.small import packs_of
from tasks.download.sources import resolve_source
from tasks.locations import is_within
from tasks.output.leases import Workspace
from tasks.text.documents import Tally, read_documents

SLICE_BYTES = 128_000_000
MOST_BYTES = 1 << 30
"""Text of an evaluation set. A larger one is rather a corpus, which was named by mistake."""
READING = DocumentPolicy(on_bad="replace")
"""A question without text is none, and one that is not Unicode is not a reason to build nothing."""


def with_pinned_sets(config: BuildConfig, workspace: Workspace, place: Store) -> BuildConfig:
    """The configuration with each evaluation set named by its digest, and stored at *place*. The same one if no step reads
    sets. ValueError, before any other work, if one cannot be read, has no such column, or nothing that can be looked for.
    """
    if not any(step.reads_sets for step in config.documents.steps):
        return config
    steps = tuple(_pinned(step, workspace, place) if step.reads_sets else step for step in config.documents.steps)
    return config.model_copy(update={"documents": config.documents.model_copy(update={"steps": steps})})


def _pinned(step: DocumentStep, workspace: Workspace, place: Store) -> DocumentStep:
    """A step with its evaluation sets read, stored at *place* and named by their digests."""
    if step.has_pinned_sets:
        raise ValueError("documents.steps: sets_url is not for configurations: a build sets it. Leave it out.")
    options = step.model_extra or {}
    size, least = options.get("ngram", 13), options.get("min_words", 8)
    sets = evaluation_sets(step)
    questions = [_read(one, workspace) for one in sets]
    stored = [of.stored() for of in questions]
    digests = [hashlib.sha256(one).hexdigest() for one in stored]
    index = index_of(digests, lambda: questions, size, least)
    against = list[dict[str, Any]]()
    for i, (one, of, looked_for, too_short) in enumerate(zip(sets, questions, index.looked_for, index.too_short, strict=True)):
        if not looked_for:
            raise ValueError(
                f"evaluation set {one.name!r}: none of its {len(of):,} questions has {min(size, least)} words. Set min_words of "
                f"the step {step.use} to fewer, or text_column to another column than {one.text_column!r}, or leave the set out."
            )
        if not place.exists(digests[i]):
            place.put(digests[i], stored[i])
        against.append({"name": one.name, "digest": digests[i], "questions": len(of), "too_short": int(too_short)})
    # No validation: the place is the build's own, which may be outside of the roots.
    return step.model_copy(update={"against": against, "sets_url": place.url})


def _read(one: EvaluationSet, workspace: Workspace) -> Questions:
    """The questions of a set. ValueError names the set."""
    sources = (one.source(),)
    try:
        found = resolve_source(sources[0], 0).files
        if within := [file.uri for file in found if is_within(file.uri, [workspace.root.url])]:
            raise ValueError(f"{within[0]} is within the output {workspace.root.url}. Keep them apart")
        texts = list[pa.LargeStringArray]()
        cuts = (cut for pack in packs_of(found) for cut in cut_files(pack, sources, SLICE_BYTES, workspace))
        for slice_ in slices_of(cuts, SLICE_BYTES):
            with local_slice(slice_, sources, workspace) as here:
                texts += (documents.texts for documents in read_documents(here, sources[0], READING, Tally()))
            if sum(some.nbytes for some in texts) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes of text. Name the questions alone")
    except ValueError as error:
        known = str(error).removeprefix(f"{one.called}: ").replace("source.", "its setting ")
        raise ValueError(f"evaluation set {one.name!r}: {known}") from error
    joined = pa.concat_arrays([texts_as_arrow([]), *texts])
    if not len(joined):
        place = f"{one.hub.path}, split {one.hub.split}" if one.hub else one.place
        raise ValueError(f"evaluation set {one.name!r}: has no questions at {place}. Leave it out, or name another file.")
    data, offsets = text_buffers(joined)
    return Questions(data, offsets.astype(np.int64))
