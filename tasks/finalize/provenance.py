"""Provenance: everything that a version's bytes depend on, the version's name made of it, and the dataset card."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import splits_of
from tasks.config import BuildConfig
from tasks.download.outlines import version_read
from tasks.models import FORMAT_SEMANTICS, Model, PinnedSource, SourceFile, digest_of
from tasks.text.signatures import EDITION
from tasks.tokenize.chat import Chat
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
    config: BuildConfig,
    pinned: tuple[PinnedSource, ...],
    files: list[SourceFile],
    tokenizer: Tokenizer,
    chats: tuple[Chat | None, ...],
) -> Provenance:
    """The provenance of a version."""
    without_fast_engine = config.tokenizer.engine == "reference" and tokenizer.make_fast is not None
    steps = config.documents.opened().described
    of_source: list[list[dict[str, Any]]] = [[] for _ in config.sources]
    for file in files:
        of_source[file.source].append(_facts_of(file))
    sources = [
        {
            **source.model_dump(exclude={"path", "hub", "table", "version", "catalog", "chat_template"}, exclude_none=True),
            **({"chat": chat.model_dump(mode="json", exclude_none=True)} if (chat := chats[i]) else {}),
            **({"steps": list(steps)} if steps else {}),  # next to the source, so that a dataset made of several keeps them
            "from": pin.origin,
            "revision": pin.revision,
            "files": of_source[i],
        }
        for i, (source, pin) in enumerate(zip(config.sources, pinned, strict=True))
    ]
    return Provenance(
        name=config.name,
        sources=tuple(sources),
        tokenizer={
            **tokenizer_facts(tokenizer),
            # It changes nothing, unless documents that it does not take are left out: then it may decide which.
            **({"engine": "reference"} if without_fast_engine and config.documents.on_bad != "error" else {}),
        },
        documents={
            **config.documents.recorded(),
            **({"signatures": EDITION} if config.documents.near_duplicates else {}),
        },
        split=config.split_facts,
    )


def _facts_of(file: SourceFile) -> dict[str, Any]:
    facts = {"name": file.name, "size": file.size, "sha256": file.sha256, "split": file.split}
    if version := version_read(file):
        facts["version"] = version
    return {**facts, "line_ends": file.line_ends} if file.line_ends else facts


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of a tokenizer in a manifest."""
    return {
        # A file's name, not where it is on this machine; a hub repository's name is whole, and has a revision.
        "name": tokenizer.name if tokenizer.revision else PurePath(tokenizer.name).name,
        "digest": tokenizer.digest,
        "highest_id": tokenizer.highest_id,
        "revision": tokenizer.revision,
    }


def build_id(made_of: Provenance, layout: LayoutName) -> str:
    """The version's name: a digest of everything that its bytes depend on."""
    return digest_of(made_of.model_dump(), LAYOUTS[layout].edition)[:16]


CARD = "README.md"


def split_words(rule: Mapping[str, Any]) -> str:
    """The rule by which a document goes to a split, in words."""
    by = rule.get("by", "key")
    return {"key": "their keys", "text": "their texts"}.get(by, f"their values of {by!r}")


def card(made_of: Provenance, layout: LayoutName, totals: dict[str, Any], version: str) -> str:
    """The dataset card."""
    documents, fraction = totals["documents"], made_of.split["validation_fraction"]
    by = split_words(made_of.split)
    by_keys = f"a share of {fraction:g} of the documents, by {by} and seed {made_of.split['seed']}"
    test = made_of.split.get("test_fraction")
    lines = [
        *card_head(made_of.name, layout, totals, version),
        *card_tokenizer(made_of.tokenizer),
        "## Documents",
        "",
        f"{documents['read']:,} read, {documents['written']:,} written, "
        + (f"{documents['text_bytes']:,} bytes of text, " if "text_bytes" in documents else "")
        + f"{documents['repeated_keys']:,} with the key of another.",
        f"Skipped: {counts_text(documents['skipped'])}. Replaced: {counts_text(documents['replaced'])}.",
        *([f"Policy: {', '.join(f'{key} {value}' for key, value in made_of.documents.items())}."] if made_of.documents else []),
        *card_steps(made_of.sources[0].get("steps") or ()),
        f"Validation: {by_keys if fraction or test else 'what the sources name as such'}.",
        *([f"Test: a share of {test:g} by the same hash."] if test else []),
        "",
        *card_sources(made_of.sources),
    ]
    return "\n".join(lines) + "\n"


COUNT_WORDS = {2: "two", 3: "three"}


def card_head(name: str, layout: LayoutName, totals: dict[str, Any], version: str) -> list[str]:
    """The lines of a card that say what the dataset is and how to read it."""
    return [
        f"# {name}",
        "",
        f"A flat-tokens dataset, version `{version}`, layout `{layout}`.",
        "",
        "| split | tokens | sequences | largest token id |",
        "|---|---:|---:|---:|",
        *(
            f"| {s} | {totals[s]['token_count']:,} | {totals[s]['seq_count']:,} | {totals[s]['max_token_id']:,} |"
            for s in splits_of(totals)
        ),
        "",
        "## Read it",
        "",
        "```python",
        "import flat_tokens",
        "",
        'dataset = flat_tokens.open("path/to/this/directory")',
        "dataset.train.sequence(0)        # token ids of the first document: uint32[length]",
        "dataset.train.slice(0, 2048)     # stored tokens: id * 2 + 1 where a sequence starts, id * 2 elsewhere",
        "```",
        "",
        'Or with plain zarr: `zarr.open_group("path/to/this/directory", mode="r")["train/encoded_tokens"]`.',
        # These words are bytes of each version: they stay.
        f"Beside the {COUNT_WORDS[len(splits_of(totals))]} splits, `documents/` has each sequence's "  # plain: see above
        "key, file (its number below, from 0) and row.",
        "",
    ]


def card_tokenizer(tokenizer: dict[str, Any]) -> list[str]:
    """The lines of a card that name the tokenizer; tokens from elsewhere may have no record of one."""
    if "name" not in tokenizer:
        return ["## Tokenizer", "", "Not recorded.", ""]
    return [
        "## Tokenizer",
        "",
        f"`{tokenizer['name']}`, ids 0 to {tokenizer['highest_id']:,}, digest `{tokenizer['digest']}`"
        + (f", revision `{tokenizer['revision']}`." if tokenizer.get("revision") else "."),
        "",
    ]


def card_steps(steps: Sequence[dict[str, Any]]) -> list[str]:
    """The line of a card that names the steps which documents took, with their versions and options."""
    lines = []
    for step in steps:
        options = [f"version {step['version']}", *(f"{key} {_option(value)}" for key, value in step["options"].items())]
        lines.append(f"{step['name']} ({', '.join(options)})")
    return [f"Steps: {'; '.join(lines)}."] if lines else []


def _option(value: Any) -> Any:
    """An option of a step for people: of evaluation sets the names and the beginnings of the digests."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
        return " and ".join(f"{one.get('name')} {str(one.get('digest', ''))[:12]}" for one in value)
    return value


def card_sources(sources: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a card that list the sources and their files, with the file numbers of ``documents/``."""
    lines, numbers = ["## Sources"], itertools.count()
    for source in sources:
        revision = f", revision `{source['revision']}`" if source.get("revision") else ""
        lines += ["", f"### {source['name']}", "", f"From {source['from']}{revision}."]
        lines += ["", "| | file | bytes | sha256 |", "|---:|---|---:|---|"]
        for file in source["files"]:
            lines.append(f"| {next(numbers)} | {file['name']} | {file['size']:,} | `{file.get('version', file['sha256'])}` |")
    return lines


def counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"
