"""The recipe of a token shard: everything that its bytes depend on, and the key made of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import pyarrow as pa
from blake3 import blake3
from pydantic import model_validator

from flat_tokens.annotations import JsonObject, Structs, UInt64s
from flat_tokens.batch import LOSS_MASK, TOKENS
from flat_tokens.manifest import CLUSTER
from tasks.config import BuildConfig, DocumentPolicy, NearDuplicates, Source, TokenizerConfig
from tasks.models import FORMAT_SEMANTICS, Model, Slice, digest_of
from tasks.output.target import SplitRule
from tasks.rows import DIGEST, KEY, ROW, SIGNATURE, SIMILARITY, SPLIT_KEY, TEXT_BYTES
from tasks.text.signatures import EDITION, NUMBERS, signatures, text_digests, text_lengths
from tasks.tokenize.chat import Chat
from tasks.tokenize.segments import DIGEST_BYTES, STORED_FILE

if TYPE_CHECKING:
    from tasks.tokenize.engines import Tokenizer


def signature_of(near: NearDuplicates) -> str:
    """The name of the signatures by which near-duplicates are found. It says how they are made."""
    return f"{SIGNATURE}-{EDITION}-{near.words}"


class TextFact(NamedTuple):
    """A fact of texts: how many numbers each text has of it, and the function for them: uint64[n] or uint64[n, numbers]."""

    numbers: int
    of: Callable[[pa.LargeStringArray], UInt64s]


def text_facts(policy: DocumentPolicy, kind: bytes = b"") -> dict[str, TextFact]:
    """The facts of texts of this *kind* that a policy asks for, by their names."""
    facts = {TEXT_BYTES: TextFact(1, text_lengths)} if policy.compares else {}
    if policy.duplicates == "drop":
        facts[DIGEST] = TextFact(2, lambda texts: text_digests(texts, kind))
    if (near := policy.near_duplicates) is not None:
        facts[signature_of(near)] = TextFact(NUMBERS, lambda texts: signatures(texts, kind, near.words))
    return facts


class Recipe(Model):
    """Everything that the tokens of slices depend on besides the slice."""

    sources: tuple[Source, ...]
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    fast: bool
    documents: DocumentPolicy
    engine: str | None = None
    """Named where it may decide which documents are left out."""
    chats: tuple[Chat | None, ...] = ()
    """How messages become tokens, for each source that has some."""
    by_reference: tuple[int, ...] = ()
    """Sources whose conversations the reference engine tokenizes."""
    steps: tuple[JsonObject, ...] = ()
    """Steps of documents, with their versions, as manifests have them."""
    split_by: str = "key"
    """The value that decides on a document's split: its key, its text or a column."""
    forgotten: str = ""
    """Digest of the output's list of documents that are left out; empty: there is none."""

    @model_validator(mode="after")
    def steps_with_versions(self) -> Self:
        if len(self.steps) != len(self.documents.steps):
            raise ValueError(f"there are {len(self.documents.steps)} steps, and versions of {len(self.steps)}")
        return self

    @classmethod
    def of(
        cls, config: BuildConfig, tokenizer: Tokenizer, chats: tuple[Chat | None, ...], forgotten: str, *, is_tried: bool = True
    ) -> Self:
        """The recipe of a build's shards. *forgotten*: the digest of the list of forgotten documents, which it leaves out.
        *is_tried*: whether the fast engine gives the reference's tokens, as far as it was tried.
        """
        has_fast = tokenizer.make_fast is not None
        fast = is_tried and has_fast and config.tokenizer.engine == "auto"
        return cls(
            sources=config.sources,
            tokenizer=config.tokenizer,
            tokenizer_digest=tokenizer.digest,
            fast=fast,
            documents=config.documents,
            # Where the engines differ, or may, the shards of one are not those of the other.
            engine="reference" if has_fast and not fast else None,
            chats=chats if any(chats) else (),
            steps=config.documents.opened().described,
            split_by=config.split.by,
            forgotten=forgotten,
        )

    def source(self, part: Slice) -> Source:
        return self.sources[part.source]

    def chat(self, part: Slice) -> Chat | None:
        return self.chats[part.source] if self.chats else None

    def key_inputs(self, part: Slice) -> dict[str, object]:
        """Everything that changes the shard's bytes: no path, time or worker, and the engine only if ``engine`` names it."""
        ranges = [one.identity() for one in part.ranges]
        # Of a run of files the digest of their ranges, as there are many.
        text: dict[str, object] = {"files": len(ranges), "ranges": digest_of(*ranges)} if len(ranges) > 1 else {}
        return {**(text or dict(zip(("file", "range"), ranges[0], strict=True))), **self._besides(part)}

    def _besides(self, part: Slice) -> dict[str, object]:
        """Everything that decides the documents of a slice besides its text. Signatures are the same for every threshold."""
        policy = {name: value for name, value in self.documents.recorded().items() if name != "near_duplicates"}
        near = self.documents.near_duplicates
        return {
            "reading": self.source(part).reading(),
            "tokenizer": self.tokenizer_digest,
            "documents": {**policy, **({"signatures": signature_of(near)} if near else {}), **self._steps()},
            "semantics": FORMAT_SEMANTICS,
            **({"engine": self.engine} if self.engine else {}),
            **({"lossy": True} if self.tokenizer.lossy else {}),
            **({"split_by": self.split_by} if self.split_by_of(part) else {}),
            **({"chat": chat.model_dump(mode="json")} if (chat := self.chat(part)) else {}),
        }

    def of_files(self, part: Slice) -> Structs:
        """The digest by which each file is known: STORED_FILE["digest"][m], of its text and of all that decides its documents."""
        recipe = digest_of("file", self._besides(part))
        digests = (blake3(f"{recipe}{one.identity()}".encode()).digest(DIGEST_BYTES) for one in part.ranges)
        return np.frombuffer(b"".join(digests), STORED_FILE["digest"])

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

    def facts(self, part: Slice) -> dict[str, int]:
        """The schema of the rows of a slice: the facts of each document, and how many numbers it has of each."""
        split_key = {SPLIT_KEY: 1} if self.split_by_of(part) else {}
        return {KEY: 1, ROW: 1, **split_key, **{name: fact.numbers for name, fact in self.facts_of_texts(part).items()}}

    def facts_of_texts(self, part: Slice) -> dict[str, TextFact]:
        """The facts that follow from the texts of a slice as they are tokenized."""
        return text_facts(self.documents, self.of_texts(part))

    def _steps(self) -> dict[str, object]:
        return {"steps": self.steps} if self.steps else {}

    def split_by_of(self, part: Slice) -> str | None:
        """The value that decides on the splits of its documents: ``text``, or a column; None if it is their keys."""
        return self.source(part).split_by(self.split_by, self.documents.opened().gives_columns)

    def token_arrays(self, part: Slice) -> tuple[str, ...]:
        """The token arrays of a slice."""
        return (TOKENS, LOSS_MASK) if self.source(part).masked or self.documents.opened().gives_spans else (TOKENS,)

    def key(self, part: Slice) -> str:
        return digest_of(self.key_inputs(part))


def settings_of_target(config: BuildConfig) -> JsonObject:
    """The settings of the version under way that follow from a configuration."""
    rule = SplitRule.of(config)
    return {
        "rule": rule,
        "leaves_out": True,
        "splits": rule.splits,
        "facts": config.facts,
        "texts": {name: fact.numbers for name, fact in text_facts(config.documents).items()}
        | ({SIMILARITY: 1} if config.documents.keeps_clusters else {}),
        "token_arrays": config.token_arrays,
        "columns": dict.fromkeys(config.kept_columns, "null") | ({CLUSTER: "uint64"} if config.documents.keeps_clusters else {}),
    }
