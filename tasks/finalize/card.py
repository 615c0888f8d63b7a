"""The card of a version, in Markdown: what it holds, how to read it, and its origin. Its bytes follow from the version alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.manifest import splits_of
from tasks.finalize.provenance import Provenance


def card(made_of: Provenance, layout: LayoutName, totals: JsonObject, version: str) -> str:
    """The dataset card."""
    documents, fraction = totals["documents"], made_of.split["validation_fraction"]
    by = made_of.split.get("by", "key")
    by = {"key": "their keys", "text": "their texts"}.get(by, f"their values of {by!r}")
    by_keys = f"a share of {fraction:g} of the documents, by {by} and seed {made_of.split['seed']}"
    test, steps = made_of.split.get("test_fraction"), []
    for step in made_of.sources[0].get("steps") or ():
        options = [f"version {step['version']}"]
        for key, value in step["options"].items():
            if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
                # Of evaluation sets the names and the beginnings of the digests.
                value = " and ".join(f"{one.get('name')} {str(one.get('digest', ''))[:12]}" for one in value)
            options.append(f"{key} {value}")
        steps.append(f"{step['name']} ({', '.join(options)})")
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
        *([f"Steps: {'; '.join(steps)}."] if steps else []),
        f"Validation: {by_keys if fraction or test else 'what the sources name as such'}.",
        *([f"Test: a share of {test:g} by the same hash."] if test else []),
        "",
        *card_sources(made_of.sources),
    ]
    return "\n".join(lines) + "\n"


COUNT_WORDS = {2: "two", 3: "three"}


def card_head(name: str, layout: LayoutName, totals: JsonObject, version: str) -> list[str]:
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


def card_tokenizer(tokenizer: JsonObject) -> list[str]:
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


def card_sources(sources: Sequence[JsonObject]) -> list[str]:
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
