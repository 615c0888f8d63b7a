"""``flat-tokens compare``: tokenizers next to each other, by versions of the same documents.

One pass over the tokens of each version. Text is counted in bytes by the versions' own ``token_bytes``; no tokenizer is loaded.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject
from flat_tokens.extras import pa
from flat_tokens.manifest import TokenBytes, read_token_bytes
from flat_tokens.rows.documents import recorded_of, values_of
from flat_tokens.rows.split import FlatTokens
from flat_tokens.rows.views import running_sums
from flat_tokens.stores.store import NO_OBJECT
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, open_corpus, windows
from flat_tokens.tools.diff import compare_documents
from flat_tokens.tools.documents import query

SUMMARY = "compare tokenizers by versions of the same documents: bytes per token, byte tokens, unused ids"
EXAMPLES = """\
examples:
  flat-tokens compare out/web out/web-32768 out/web-65536      bytes per token by source, and by language if it is kept
  flat-tokens compare out/web out/web-gpt2 --by domain         by another kept column
  flat-tokens compare out/web out/web-gpt2 --html compare.html a page with a picture, in one file

Versions of other documents, or with other splits, cannot be compared: status 2, with the difference.
"""

COUNT_TOKENS = 1 << 18
"""Tokens counted at a time: they and their counts stay in the processor's cache."""
MOST_VALUES = 1 << 12
"""Different values of a column, at most."""
LANGUAGES = ("language", "lang")
"""Kept columns that are compared unless others are named."""
GROUPS_SHOWN = 20
NO_VALUE = "(none)"
HEAD = ("tokenizer", "tokens", "change", "bytes per token", "byte tokens", "unused ids")

TOKENS, BYTES, BYTE_TOKENS = range(3)


ARGUMENTS = """
paths=VERSION...  an output or a version: two or more of the same documents
--split NAME  this split alone
--by COLUMN...  a kept column; may be given several times
--html FILE  write a page with a picture: one HTML file that needs no other
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "compare", run, SUMMARY, EXAMPLES, ARGUMENTS)


def run(options: argparse.Namespace) -> int:
    found = compare([open_corpus(path) for path in options.paths], options.split, options.by)
    told = lines(found)
    if options.html is not None:
        told = iter([cli.write_file(options.html, page(found))])
    terminal.show(options, found, told)
    return cli.SAME


def compare(corpora: Sequence[Corpus], split: str | None = None, by: Sequence[str] | None = None) -> JsonObject:
    """All numbers of a comparison, for JSON. *by*: kept columns to group documents by; a language without them. ValueError if the
    corpora are not versions of the same documents and splits, or one does not keep a column.
    """
    if len(corpora) < 2:
        raise ValueError("name two versions or more")
    tables = [token_bytes_of(corpus) for corpus in corpora]
    for other in corpora[1:]:
        check_same(corpora[0], other)
    kept = [corpus.manifest.get("columns") or {} for corpus in corpora]
    for name, (corpus, its) in itertools.product(by or (), zip(corpora, kept, strict=True)):
        if name not in its:
            raise ValueError(f"{corpus.url}: keeps no column {name!r}; it keeps {', '.join(sorted(its)) or 'none'}")
    columns = list(dict.fromkeys(by or [name for name in LANGUAGES if all(name in its for its in kept)][:1]))
    counted = [count(corpus, table, columns, split) for corpus, table in zip(corpora, tables, strict=True)]
    exact = [k for k, table in enumerate(tables) if table.is_exact]
    by_group = {kind: _groups(kind, corpora, counted, exact) for kind in ("source", *columns)}
    text_bytes = sum(group["text_bytes"] for group in by_group["source"]) if exact else None
    totals = zip(corpora, tables, counted, strict=True)
    return {
        "split": split,
        "text_bytes": text_bytes,
        "versions": [_version(corpus, table, of, text_bytes) for corpus, table, of in totals],
        "by": by_group,
    }


def token_bytes_of(corpus: Corpus) -> TokenBytes:
    """The bytes of a version's tokens. ValueError if it has no record of them."""
    if not corpus.manifest:
        raise ValueError(f"{corpus.url}: has no manifest. Only versions that say what they are made of are compared")
    try:
        return read_token_bytes(corpus.store, corpus.manifest)
    except NO_OBJECT as error:
        raise ValueError(
            f"{corpus.url}: has no record of the bytes of its tokens: they are from elsewhere. Build it again at another output"
        ) from error


def check_same(a: Corpus, b: Corpus) -> None:
    """ValueError, with the difference, if two corpora are not of the same documents in the same splits."""
    for corpus in (a, b):
        for name in corpus.splits:
            if corpus.documents(name) is None:
                raise ValueError(f"{corpus.url}: has no record of its documents, so that nothing says which they are")
    if list(a.splits) != list(b.splits):
        raise ValueError(f"{a.url} has {', '.join(a.splits)}, but {b.url} has {', '.join(b.splits)}. Name whole versions")
    found = compare_documents(a, b, 1)
    for kind, words in (
        ("removed", "are in the first alone"),
        ("added", "are in the second alone"),
        ("moved", "are in another split"),
        ("changed", "have other tokens, though the tokenizer is the same"),
    ):
        if found[kind]:
            (example,) = found["examples"][kind]
            place = example.get("a") or example["b"]
            raise ValueError(
                f"{a.url} and {b.url} are not of the same documents and splits: {found[kind]:,} {words}, such as "
                f"{place['split']} {place['sequence']:,}, key {place['document']['key']}. Compare versions that retokenize made"
            )


class VersionCounts(NamedTuple):
    """Counts of a version. ``groups``: by kind and name, int64[3]: tokens, bytes, tokens of one byte. ``ids``: int64[ids]."""

    groups: Mapping[str, Mapping[str, Int64s]]
    ids: Int64s


def count(corpus: Corpus, table: TokenBytes, columns: Sequence[str], split: str | None) -> VersionCounts:
    """Count the tokens of a version, in one pass."""
    lengths, ids = table.lengths.astype(np.int64), np.zeros(len(table.lengths), np.int64)
    groups = {
        kind: {source.name: np.zeros(3, np.int64) for source in corpus.sources if kind == "source"}
        for kind in ("source", *columns)
    }
    recorded = functools.cache(lambda: recorded_of(corpus.store))
    for read in corpus.chosen(split).values():
        counts = np.zeros((3, read.seq_count + 1), np.int64)  # of tokens, bytes, tokens of one byte; first of no sequence
        for window in windows(read, max_tokens=COUNT_TOKENS):
            if len(window.ids) and int(window.ids.max()) >= len(lengths):
                raise ValueError(
                    f"a token has id {window.ids.max()}, but the tokenizer has {len(lengths)}. Run flat-tokens verify"
                )
            ids += np.bincount(window.ids, minlength=len(ids))
            of_ids = lengths[window.ids]
            # Range 0 continues the sequence before; range k is the window's k-th sequence.
            bounds = np.concatenate([[0], window.starts, [len(window.ids)]])
            totals = [bounds, running_sums(of_ids)[bounds], running_sums(of_ids == 1)[bounds]]
            counts[:, window.first_seq : window.first_seq + len(bounds) - 1] += np.diff(totals)
        counts = counts[:, 1:]
        for kind, sums in groups.items():
            assert isinstance(read, FlatTokens)
            names = values_of(read, kind, 0, read.seq_count, recorded)
            documents = pa.table([names, *map(pa.array, counts)], ["name", "tokens", "bytes", "single"])
            found = query(
                documents, "SELECT name, sum(tokens), sum(bytes), sum(single) FROM documents GROUP BY name ORDER BY name"
            )
            for name, *of_name in found:
                sums[_name(name)] = sums.get(_name(name), 0) + np.array(of_name, np.int64)
            if len(sums) > MOST_VALUES:
                raise ValueError(
                    f"{corpus.url}: column {kind!r} has more than {MOST_VALUES:,} different values, too many for a table. Name "
                    "another with --by"
                )
    return VersionCounts(groups, ids)


def _name(value: Any) -> str:
    return NO_VALUE if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _groups(kind: str, corpora: Sequence[Corpus], counted: Sequence[VersionCounts], exact: Sequence[int]) -> list[JsonObject]:
    """The groups of a kind, the one with most text first. ValueError if two versions have other text in one."""
    names = list(dict.fromkeys(name for of in counted for name in of.groups[kind]))
    nothing = np.zeros(3, np.int64)
    rows = []
    for name in names:
        found = [of.groups[kind].get(name, nothing) for of in counted]
        text = [int(found[k][BYTES]) for k in exact]
        if wrong := [k for k, size in zip(exact, text, strict=True) if size != text[0]]:
            first, other = corpora[exact[0]].url, corpora[wrong[0]].url
            raise ValueError(
                f"{first} and {other} are not of the same texts: {kind} {name!r} has "
                f"{terminal.plural(text[0], 'byte')} in one and "
                f"{int(found[wrong[0]][BYTES]):,} in the other. Refresh both, or retokenize one"
            )
        size = text[0] if text else None
        rows.append({"name": name, "text_bytes": size, "of": [_rates(of, size) for of in found]})
    return sorted(rows, key=lambda row: (-(row["text_bytes"] or row["of"][0]["token_bytes"]), row["name"]))


def _rates(counts: Int64s, text_bytes: int | None) -> JsonObject:
    """Counts of a group and their ratios. Without *text_bytes*, bytes are those that the tokens stand for."""
    tokens, size = int(counts[TOKENS]), int(counts[BYTES])
    return {
        "token_count": tokens,
        "token_bytes": size,
        "bytes_per_token": (size if text_bytes is None else text_bytes) / tokens if tokens else None,
        "byte_token_share": int(counts[BYTE_TOKENS]) / tokens if tokens else None,
    }


def _version(corpus: Corpus, table: TokenBytes, counted: VersionCounts, text_bytes: int | None) -> JsonObject:
    """Counts of a version. ``unused``: ids with bytes that do not occur."""
    counts = np.sum([np.zeros(3, np.int64), *counted.groups["source"].values()], axis=0)
    is_token = table.lengths > 0
    tokenizer = corpus.tokenizer
    return {
        "path": corpus.url,
        "tokenizer": tokenizer.name if tokenizer else None,
        "digest": table.tokenizer,
        "exact": table.is_exact,
        **_rates(counts, text_bytes),
        "vocabulary": int(is_token.sum()),
        "unused": int((is_token & (counted.ids == 0)).sum()),
    }


def names_of(found: JsonFacts) -> list[str]:
    """Short names of the versions: their tokenizers', with the output's if two are alike."""
    names = [str(version["tokenizer"]) for version in found["versions"]]
    outputs = [version["path"].split("/versions/")[0].rstrip("/").rpartition("/")[2] for version in found["versions"]]
    return [name if names.count(name) == 1 else f"{name} ({output})" for name, output in zip(names, outputs, strict=True)]


def total_rows(found: JsonFacts) -> Iterator[list[str]]:
    """A row of the table of versions for each: tokenizer, tokens, change, bytes per token, byte tokens, unused ids."""
    first = found["versions"][0]["token_count"]
    for name, one in zip(names_of(found), found["versions"], strict=True):
        change = f"{one['token_count'] / first - 1:+.1%}".replace("%", " %") if first and one is not found["versions"][0] else ""
        unused = f"{one['unused']:,} of {one['vocabulary']:,}"
        yield [name, f"{one['token_count']:,}", change, rate(one["bytes_per_token"]), share_text(one["byte_token_share"]), unused]


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def share_text(value: float | None) -> str:
    return "-" if value is None else terminal.percent(value)


def lines(found: JsonFacts) -> Iterator[str]:
    """The comparison for people."""
    names = names_of(found)
    for name, version in zip(names, found["versions"], strict=True):
        yield f"{name}  {version['path']}"
    yield from ["", *terminal.table([HEAD, *total_rows(found)], "<>>>>>")]
    for kind, groups in found["by"].items():
        rows = [
            [terminal.line(group["name"]), terminal.size(group["text_bytes"] or group["of"][0]["token_bytes"])]
            + [rate(of["bytes_per_token"]) for of in group["of"]]
            for group in groups[:GROUPS_SHOWN]
        ]
        yield from ["", f"bytes per token by {kind}", *terminal.table([["", "text", *names], *rows], "<>" + ">" * len(names))]
        if len(groups) > GROUPS_SHOWN:
            yield f"  and {len(groups) - GROUPS_SHOWN:,} more: --json has all"
    if note := note_of(found):
        yield from ["", note]


def note_of(found: JsonFacts) -> str:
    """A sentence on versions whose tokens do not stand for the bytes of the text; empty if there are no such versions."""
    changing = [name for name, one in zip(names_of(found), found["versions"], strict=True) if not one["exact"]]
    if not changing:
        return ""
    if found["text_bytes"] is None:
        return f"{', '.join(changing)}: bytes are those that tokens stand for; each tokenizer changes text in its own way"
    return f"{', '.join(changing)}: changes text before it is tokenized; bytes are those of the text"


def page(found: JsonFacts) -> str:
    """The comparison as one HTML document."""
    names = names_of(found)
    rows = {
        kind: [
            [group["name"], f"{group['text_bytes'] or group['of'][0]['token_bytes']:,}"]
            + [f"{of['token_count']:,}" for of in group["of"]]
            + [share_text(of["byte_token_share"]) for of in group["of"]]
            for group in groups
        ]
        for kind, groups in found["by"].items()
    }
    return terminal.page(
        "compare.html",
        found=found,
        names=names,
        head=HEAD,
        totals=list(total_rows(found)),
        note=note_of(found),
        columns=[f"{what}, {name}" for what in ("tokens", "byte tokens") for name in names],
        rows=rows,
        places=[(name, version["path"]) for name, version in zip(names, found["versions"], strict=True)],
    )
