"""The recipe of a token shard: everything that its bytes depend on, and the key made of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from flat_tokens.stores.store import StoredObject
from tasks.config import READING, DocumentPolicy, Source, TokenizerConfig
from tasks.models import FORMAT_SEMANTICS, Model, Slice, digest_of
from tasks.output.staging import Place


class Recipe(Model):
    """Everything that the tokens of slices depend on besides the slice, and where the shards go."""

    place: Place
    sources: tuple[Source, ...]
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    fast: bool
    documents: DocumentPolicy
    engine: str | None = Field(None, description="Named where it may decide which documents are left out")

    def source(self, part: Slice) -> Source:
        return self.sources[part.file.source]

    def key_inputs(self, part: Slice) -> dict[str, object]:
        """Everything that changes the shard's bytes: no path, no time, no worker, and the engine only where it may decide which
        documents are left out.
        """
        return {
            "file": part.file.identity(),
            "range": (part.start, part.stop, part.rows),
            "reading": self.source(part).reading(),
            "tokenizer": self.tokenizer_digest,
            "documents": self.documents.model_dump(),
            "semantics": FORMAT_SEMANTICS,
            **({"engine": self.engine} if self.engine else {}),
        }

    def key(self, part: Slice) -> str:
        return digest_of(self.key_inputs(part))


class Ingredients(NamedTuple):
    """Everything that the bytes of a token shard depend on besides its range: the same for all shards of a file, however it is
    sliced. The values are as JSON has them, so that receipts and manifests compare.
    """

    content: str
    reading: list[Any]
    tokenizer: str | None
    documents: dict[str, Any] | None
    semantics: str

    @property
    def digest(self) -> str:
        return digest_of(*self)


def ingredients_of(inputs: Mapping[str, Any]) -> Ingredients:
    """The ingredients of a built or imported shard, from its receipt's inputs. LookupError where they are neither's."""
    if "content" in inputs:
        content, reading, documents = inputs["content"], [inputs["format"], inputs["options"]], None
    else:
        content, reading, documents = inputs["file"][0], inputs["reading"], inputs["documents"]
    return Ingredients(content, reading, inputs["tokenizer"], documents, inputs["semantics"])


def ingredients_needed(made_of: Mapping[str, Any]) -> Iterator[Ingredients]:
    """The ingredients of all shards that a version with this provenance is written from, and maybe of more."""
    tokenizer, semantics = made_of.get("tokenizer", {}).get("digest"), made_of.get("semantics", "")
    for source in made_of.get("sources", ()):
        files = source.get("files", ())
        if stored := [StoredObject(**part) for file in files for part in file.get("parts", ())]:
            reading = [source.get("format"), source.get("options")]
            yield Ingredients(imported_content(stored), reading, tokenizer or "", None, semantics)
        for file in files:
            reading = [source.get(setting) for setting in READING]
            yield Ingredients(file["sha256"], reading, tokenizer, made_of.get("documents"), semantics)


def imported_content(stored: Sequence[StoredObject]) -> str:
    """The digest of all files of an import, in any order."""
    return digest_of(*map(list, sorted(stored)))
