"""The slices of a build that are stored already, and the engine for those that are not, tried on a sample of their documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.download.cut import FETCHERS, local_slice
from tasks.download.sources import naming
from tasks.models import Slice
from tasks.output.leases import Workspace
from tasks.parts.part import ShardPart
from tasks.progress import meter
from tasks.shards.index import VersionNames, indexed_versions, stored_tokens, unread_slices, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally, TextBatch, read_documents
from tasks.tokenize.chat import chats_by_reference
from tasks.tokenize.engines import Tokenizer, engine_of, may_use_fast_engine, was_tried

SAMPLE_DOCUMENTS, SAMPLE_BYTES = 64, 100_000
"""A few sources give so much each. Each of many gives less, down to an eighth: the reference engine is slow."""
LITTLE_TEXT = 1 << 18
"""Bytes of text for which the fast engine is not tried: the reference has tokenized them by the time that takes."""


class StoredSlices(NamedTuple):
    """The slices of a build: their keys in receipts; each by its key, as equal slices are tokenized once; the versions whose
    indexes are used; the keys that have receipts, and the files of the other slices that have to be read.
    """

    keys: list[str]
    slices: dict[str, Slice]
    versions: VersionNames
    receipts: set[str]
    unread: list[Slice]

    @classmethod
    def look_up(cls, root: Store, recipe: Recipe, of_build: list[Slice]) -> StoredSlices:
        """Look the slices up by receipts and indexes, and begin to count progress."""
        keys, versions = list(map(recipe.key, of_build)), indexed_versions(root)
        slices = dict(zip(keys, of_build, strict=True))
        unpublished = without_tokens(root, versions, list(slices))
        missing = without_receipt(root, unpublished)
        total = sum(slice_.text_bytes for slice_ in slices.values())
        meter.begin("tokenize", total, stored=total - sum(slices[key].text_bytes for key in missing))
        unread = unread_slices(map(slices.__getitem__, missing), recipe, stored_tokens(root, versions))
        return cls(keys, slices, versions, set(unpublished) - set(missing), unread)

    def reuse(self, slices: list[Slice], parts: list[ShardPart]) -> dict[str, int]:
        """The numbers of slices and of reused slices, and the bytes of text that were tokenized."""
        shards = {part.shard.key: part.shard for part in parts if part.shard.published is None}
        made = [shard for key, shard in shards.items() if key not in self.receipts]
        text_bytes = sum(shard.text_bytes - shard.text_bytes_taken for shard in made)
        return {"slices": len(slices), "slices_reused": len(parts) - len(made), "text_bytes_tokenized": text_bytes}


def with_tried_engine(
    recipe: Recipe, config: BuildConfig, workspace: Workspace, tokenizer: Tokenizer, slices: list[Slice]
) -> Recipe:
    """The recipe with the engine that a sample of the documents of *slices* allows."""
    text_bytes = sum(slice_.text_bytes for slice_ in slices)
    # Where bad documents are left out, the engine may decide which, and the keys of shards name it.
    if text_bytes <= LITTLE_TEXT and not recipe.chats and config.documents.on_bad == "error" and not was_tried(tokenizer):
        return recipe.model_copy(update={"fast": False})
    samples = sample_texts(config, workspace, slices)
    texts = [text for of in samples.values() for text in of]
    is_right = may_use_fast_engine(tokenizer, config.tokenizer.engine, texts, text_bytes, config.processors)
    if is_right != recipe.fast:
        recipe = Recipe.of(config, tokenizer, recipe.chats, recipe.forgotten, is_tried=is_right)
    if not recipe.chats:
        return recipe
    engine = engine_of(tokenizer, recipe.fast)
    by_reference = chats_by_reference(config.sources, recipe.chats, samples, config.tokenizer, engine)
    return recipe.model_copy(update={"by_reference": by_reference})


def look_up_slices(
    config: BuildConfig, workspace: Workspace, tokenizer: Tokenizer, slices: list[Slice], recipe: Recipe
) -> tuple[Recipe, StoredSlices]:
    """The recipe for slices that are not stored, with the engine that was tried on them, and the slices that are stored."""
    stored = StoredSlices.look_up(workspace.root, recipe, slices)
    if not stored.unread:
        return recipe, stored
    other = with_tried_engine(recipe, config, workspace, tokenizer, stored.unread)
    return other, stored if other.engine == recipe.engine else StoredSlices.look_up(workspace.root, other, slices)


def sample_texts(config: BuildConfig, workspace: Workspace, slices: list[Slice]) -> dict[int, list[str]]:
    """Some of the first documents of every source, none of them long: the reference engine is slow."""
    texts: dict[int, list[str]] = {}
    first_of = sorted({slice_.source: slice_ for slice_ in reversed(slices)}.items())
    share = min(max(len(first_of) // 8, 1), 8)
    with ThreadPoolExecutor(FETCHERS) as fetchers:
        read = fetchers.map(lambda one: _first_documents(one[1], config, workspace), first_of)
    for (index, _), documents in zip(first_of, read, strict=True):
        left = SAMPLE_BYTES // share
        for text in documents.texts.slice(0, SAMPLE_DOCUMENTS // share) if documents else ():
            if len(text.as_buffer()) <= left:
                left -= len(text.as_buffer())
                texts.setdefault(index, []).append(text.as_py())
    return texts


def _first_documents(slice_: Slice, config: BuildConfig, workspace: Workspace) -> TextBatch | None:
    with naming(config.sources, slice_.source), local_slice(slice_, config.sources, workspace) as here:
        return next(read_documents(here, config.sources[slice_.source], config.documents, Tally(), SAMPLE_BYTES), None)
