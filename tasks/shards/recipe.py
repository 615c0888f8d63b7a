"""The recipe of a token shard: everything that its bytes depend on, and the key made of that."""

from __future__ import annotations

from pydantic import Field

from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.models import FORMAT_SEMANTICS, Model, Slice, digest_of
from tasks.output.staging import Place


class Recipe(Model):
    """What a slice's tokens depend on, besides the slice, and where the shard goes."""

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
        """Every ingredient that changes the shard's bytes, and nothing else: no path, no time, no worker, and no engine
        unless documents that it does not take are left out.
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
