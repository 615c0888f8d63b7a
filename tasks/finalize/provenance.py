"""Provenance: everything that a version's bytes depend on, and the version's name made of it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from flat_tokens.arrays.layouts import LayoutName
from tasks.config import BuildConfig
from tasks.models import FORMAT_SEMANTICS, Model, PinnedSource, SourceFile, digest_of
from tasks.tokenize.engines import Tokenizer


class Provenance(Model):
    """Everything that a version's bytes depend on; nothing of when, where or by whom."""

    name: str
    sources: tuple[dict[str, Any], ...]
    tokenizer: dict[str, Any]
    documents: dict[str, Any]
    split: dict[str, Any]
    semantics: str = FORMAT_SEMANTICS


def provenance(
    config: BuildConfig, pinned: tuple[PinnedSource, ...], files: list[SourceFile], tokenizer: Tokenizer
) -> Provenance:
    sources = []
    for i, (source, pin) in enumerate(zip(config.sources, pinned, strict=True)):
        sources.append(
            {
                **source.model_dump(exclude={"path", "hub"}, exclude_none=True),
                "from": pin.origin,
                "revision": pin.revision,
                "files": [file.model_dump(include={"name", "size", "sha256", "split"}) for file in files if file.source == i],
            }
        )
    return Provenance(
        name=config.name,
        sources=tuple(sources),
        tokenizer={
            **tokenizer_facts(tokenizer),
            # It changes nothing, unless documents that it does not take are left out: then it may decide which.
            **({"engine": "reference"} if without_fast_engine(config, tokenizer) else {}),
        },
        documents=config.documents.model_dump(),
        split={"validation_fraction": config.fraction, "seed": config.split_seed},
    )


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of a tokenizer in a manifest."""
    return {
        # A file's name, not where it lies on this machine; a hub repository's name is whole, and has a revision.
        "name": tokenizer.name if tokenizer.revision else PurePath(tokenizer.name).name,
        "digest": tokenizer.digest,
        "highest_id": tokenizer.highest_id,
        "revision": tokenizer.revision,
    }


def without_fast_engine(config: BuildConfig, tokenizer: Tokenizer) -> bool:
    """Whether the fast engine is forbidden, and that may decide which documents are left out."""
    return config.tokenizer.engine == "reference" and tokenizer.make_fast is not None and config.documents.on_bad != "error"


def build_id(made_of: Provenance, layout: LayoutName) -> str:
    """The version's name: a digest of everything that its bytes depend on."""
    return digest_of(made_of.model_dump(), layout)[:16]
