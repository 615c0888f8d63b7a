"""The recipe of a token shard: everything that its bytes depend on, and the key made of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator

from flat_tokens.stores.store import StoredObject
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.models import FORMAT_SEMANTICS, SIGNATURE, Model, Slice, digest_of
from tasks.text.signatures import EDITION, signatures
from tasks.tokenize.chat import Chat


class Recipe(Model):
    """Everything that the tokens of slices depend on besides the slice."""

    sources: tuple[Source, ...]
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    fast: bool
    documents: DocumentPolicy
    engine: str | None = Field(None, description="Named where it may decide which documents are left out")
    chats: tuple[Chat | None, ...] = Field((), description="Of each source with messages, how these become tokens")
    by_reference: tuple[int, ...] = Field((), description="Sources whose conversations the reference engine tokenizes")
    steps: tuple[dict[str, Any], ...] = Field((), description="Of documents, with their versions, as manifests have them")
    split_by: str = Field("key", description="What decides on a document's split: its key, its text or a column")
    forgotten: str = Field("", description="Digest of the output's list of documents that are left out; empty: there is none")

    @model_validator(mode="after")
    def steps_with_versions(self) -> Self:
        if len(self.steps) != len(self.documents.steps):
            raise ValueError(f"there are {len(self.documents.steps)} steps, and versions of {len(self.steps)}")
        return self

    def source(self, part: Slice) -> Source:
        return self.sources[part.source]

    def chat(self, part: Slice) -> Chat | None:
        return self.chats[part.source] if self.chats else None

    def key_inputs(self, part: Slice) -> dict[str, object]:
        """Everything that changes the shard's bytes: no path, time or worker, and the engine only where ``engine`` names it."""
        return {
            **self._text_of(part),
            "reading": self.source(part).reading(),
            "tokenizer": self.tokenizer_digest,
            "documents": {**self._policy(), **self._steps()},
            "semantics": FORMAT_SEMANTICS,
            **({"engine": self.engine} if self.engine else {}),
            **({"lossy": True} if self.tokenizer.lossy else {}),
            **({"split_by": self.split_by} if self.has_split_keys(part) else {}),
            **({"chat": chat.model_dump(mode="json")} if (chat := self.chat(part)) else {}),
        }

    def _text_of(self, part: Slice) -> dict[str, object]:
        """The facts that decide the text of a slice: its range, or of a run of files the digest of theirs, as there are many."""
        ranges = [one.identity() for one in part.ranges]
        if len(ranges) > 1:
            return {"files": len(ranges), "ranges": digest_of(*ranges)}
        return dict(zip(("file", "range"), ranges[0], strict=True))

    def of_segments(self, part: Slice) -> bytes:
        """The digest of all that decides the tokens of a segment besides its documents, in 64 bytes: files and ranges do not."""
        tokenizer = (self.tokenizer_digest, self.engine, self.tokenizer.lossy)
        policy = {**self.documents.model_dump(exclude={"steps", "duplicates", "near_duplicates"}), **self._steps()}
        return digest_of("segment", FORMAT_SEMANTICS, policy, *tokenizer, *self._loss(part)).encode()

    def of_texts(self, part: Slice) -> bytes:
        """The kind of its texts, in 32 bytes: those of two kinds are not the same document, even if they have the same bytes."""
        return bytes.fromhex(digest_of("text", *self._loss(part)))

    def _loss(self, part: Slice) -> list[object]:
        """The settings that decide which tokens of a masked source count."""
        chat = self.chat(part)
        return [chat.model_dump(mode="json") if chat else "completion"] if self.source(part).masked else []

    @property
    def signed(self) -> str | None:
        """The name of the array of signatures, which says how they are made; None without them."""
        near = self.documents.near_duplicates
        return f"{SIGNATURE}-{EDITION}-{near.words}" if near else None

    def signatures_of(self, texts: pa.LargeStringArray, part: Slice) -> npt.NDArray[np.uint64]:
        """The signatures of texts of a slice: uint64[n, NUMBERS]. For a recipe that has them."""
        near = self.documents.near_duplicates
        assert near is not None
        return signatures(texts, self.of_texts(part), near.words)

    def _policy(self) -> dict[str, object]:
        """The policy as far as it decides the bytes of a shard: signatures are the same for every threshold."""
        policy = {name: value for name, value in self.documents.recorded().items() if name != "near_duplicates"}
        return {**policy, **({"signatures": self.signed} if self.signed else {})}

    def _steps(self) -> dict[str, object]:
        return {"steps": self.steps} if self.steps else {}

    def split_by_of(self, part: Slice) -> str | None:
        """The value that decides on the splits of its documents: ``text``, or a column; None where it is their keys."""
        return self.source(part).split_by(self.split_by, self.documents.opened().gives_columns)

    def has_split_keys(self, part: Slice) -> bool:
        """Whether its shard has split keys."""
        return self.split_by_of(part) is not None

    def masked(self, part: Slice) -> bool:
        """Whether its tokens have a loss mask."""
        return self.source(part).masked or self.documents.opened().gives_spans

    def key(self, part: Slice) -> str:
        return digest_of(self.key_inputs(part))


def imported_content(stored: Sequence[StoredObject]) -> str:
    """The digest of all files of an import, in any order."""
    return digest_of(*map(list, sorted(stored)))
