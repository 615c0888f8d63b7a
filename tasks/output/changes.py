"""Differences between two versions, by their manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from flat_tokens.annotations import IntPair, JsonObject
from flat_tokens.manifest import SplitName, compare_files
from flat_tokens.tools.terminal import markdown, plural, source_called
from tasks.models import Model

SHOWN_FILES = 20
NOT_SET = {"runs", "forgotten", "keep"}
"""Facts next to the settings of documents and splits: they follow from the files, and from what was forgotten and published."""

Kind = Literal["added", "removed", "changed", "moved"]


class FileChange(Model):
    """A file that differs. ``moved``: it has the same content under another name, which was *former_name*."""

    source: str
    name: str
    kind: Kind
    sha256: str
    former_sha256: str | None = None
    former_name: str | None = None


class SourceChange(Model):
    """Files, written documents and their tokens, before and after; None if they are unknown or there was no such source."""

    name: str
    files: IntPair
    documents: tuple[int | None, int | None]
    tokens: tuple[int | None, int | None]


class DocumentChangeCounts(Model):
    """Changes of the documents of one source, of one split, or of all. A removed document counts for its old split, any other
    for its new one. A changed document may have moved, too. ``changed``: None if the tokenizers differ.
    """

    name: str
    added: int
    removed: int
    changed: int | None
    moved: int


class SplitChange(Model):
    """The number of documents that moved from one split to another."""

    before: SplitName
    after: SplitName
    documents: int


class DocumentChanges(Model):
    """Documents that were added, removed, changed (the same key, other tokens) and moved to another source. Sources and splits
    without changes are left out. ``of_splits``: those that changed their split, by both splits.
    """

    total: DocumentChangeCounts = DocumentChangeCounts(name="all", added=0, removed=0, changed=0, moved=0)
    by_source: tuple[DocumentChangeCounts, ...] = ()
    by_split: tuple[DocumentChangeCounts, ...] = ()
    of_splits: tuple[SplitChange, ...] = ()

    @property
    def split_changes(self) -> str:
        """Such as ``12 train → validation, 3 validation → train``; empty if no document changed its split."""
        return ", ".join(f"{one.documents:,} {one.before} → {one.after}" for one in self.of_splits)


class Changes(Model):
    """Changes from version *before* (None: there was none) to *after*. ``settings``: other causes of other bytes, as sentences.
    ``documents``: None if it is unknown, or was not asked for.
    """

    before: str | None
    after: str
    files: tuple[FileChange, ...]
    sources: tuple[SourceChange, ...]
    settings: tuple[str, ...]
    documents: DocumentChanges | None = None

    @property
    def headline(self) -> str:
        """Such as ``2 files added, 1 removed, 1 changed``."""
        counts = Counter(file.kind for file in self.files)
        parts = [f"{counts[kind]:,} {kind}" for kind in get_args(Kind) if counts[kind]]
        if parts:
            count, _, kind = parts[0].partition(" ")
            parts[0] = f"{count} {'file' if count == '1' else 'files'} {kind}"
        return ", ".join([*parts, *self.settings]) or "nothing changed"


def changes_between(before: str | None, old: JsonObject | None, after: str, new: JsonObject) -> Changes:
    """Compare two manifests; *old* is None if there was no version."""
    then = {source["name"]: source for source in sources_of(old["provenance"])} if old else {}
    now = {source["name"]: source for source in sources_of(new["provenance"])}
    counted_then, counted_now = _counted(old), _counted(new)
    sources: list[SourceChange] = []
    files: list[FileChange] = []
    for name in dict.fromkeys([*now, *then]):
        were, are = digests_of(then.get(name)), digests_of(now.get(name))
        files += file_changes(name, were, are)
        documents, tokens = (
            (counted_then.get(name, {}).get(count), counted_now.get(name, {}).get(count)) for count in ("written", "token_count")
        )
        sources.append(SourceChange(name=name, files=(len(were), len(are)), documents=documents, tokens=tokens))
    settings = tuple(_settings(old, new)) if old else ()
    return Changes(before=before, after=after, files=tuple(files), sources=tuple(sources), settings=settings)


def sources_of(made_of: JsonObject) -> list[JsonObject]:
    """The sources in the provenance of a manifest. A dataset of another writer may have none."""
    return made_of.get("sources") or []


def digests_of(source: JsonObject | None) -> dict[str, str]:
    """The content of each file of a manifest's source, by its name."""
    return {file["name"]: file["sha256"] for file in source.get("files", ())} if source else {}


def _counted(manifest: JsonObject | None) -> dict[str, JsonObject]:
    by_source = (manifest["totals"].get("documents") or {}).get("by_source") or [] if manifest else []
    return {counts["name"]: counts for counts in by_source}


def file_changes(source: str, then: dict[str, str], now: dict[str, str]) -> Iterator[FileChange]:
    """Changes of one source's files, name -> content, in the order of their names."""
    files = compare_files(then, now)
    former = {new: old for old, new in files.renamed}
    of_kind: dict[Kind, Iterable[str]] = {
        "added": files.added,
        "removed": files.removed,
        "changed": files.changed,
        "moved": former,
    }
    for name, kind in sorted((name, kind) for kind, names in of_kind.items() for name in names):
        sha256, before = now.get(name, then.get(name, "")), then[name] if kind == "changed" else None
        yield FileChange(source=source, name=name, kind=kind, sha256=sha256, former_sha256=before, former_name=former.get(name))


def _settings(old: JsonObject, new: JsonObject) -> Iterator[str]:
    """All other differences as sentences: revision, tokenizer, policy, split, columns, layout."""
    was, now = old["provenance"], new["provenance"]
    earlier = {source["name"]: source for source in sources_of(was)}
    for source in sources_of(now):
        for key in sorted({*source, *earlier.get(source["name"], source)} - {"name", "files"}):
            if source["name"] in earlier and source.get(key) != earlier[source["name"]].get(key):
                yield _sentence(f"{source['name']}.{key}", earlier[source["name"]].get(key), source.get(key))
    for part in ("tokenizer", "documents", "split"):
        before, after = was.get(part) or {}, now.get(part) or {}
        for key in sorted({*before, *after} - NOT_SET):
            if before.get(key) != after.get(key):
                yield _sentence(f"{part}.{key}", before.get(key), after.get(key))
    if [source["name"] for source in sources_of(was)] != [source["name"] for source in sources_of(now)]:
        yield "the list of sources changed"
    for key in ("name", "semantics"):
        if was.get(key) != now.get(key):
            yield _sentence(key, was.get(key), now.get(key))
    if old["layout"] != new["layout"]:
        yield _sentence("layout", old["layout"], new["layout"])


def _sentence(what: str, was: Any, now: Any) -> str:
    return f"{what} {_short(was)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text


def as_text(changes: Changes) -> list[str]:
    """Lines for a terminal: one for each file, the first ones of many, and one for each source."""
    lines = []
    for one in changes.files[:SHOWN_FILES]:
        tail = f" (was {one.former_name})" if one.former_name else ""
        digests = f"{one.former_sha256[:12]} -> {one.sha256[:12]}" if one.former_sha256 else one.sha256[:12]
        lines.append(f"  {one.kind:10} {one.source}: {one.name}{tail}  {digests}")
    if len(changes.files) > SHOWN_FILES:
        lines.append(f"  ...        and {plural(len(changes.files) - SHOWN_FILES, 'more file')}")
    lines += [f"  setting    {sentence}" for sentence in changes.settings]
    lines += [
        f"  {source.name:10} documents {_step(source.documents)}, tokens {_step(source.tokens)}, files {_step(source.files)}"
        for source in changes.sources
    ]
    lines += [f"  {name:10} {_told(counts)}" for name, counts in _document_counts(changes)]
    of_splits = changes.documents.split_changes if changes.documents else ""
    return [*lines, *([f"  splits     {of_splits}"] if of_splits else [])]


def _document_counts(changes: Changes) -> Iterator[tuple[str, DocumentChangeCounts]]:
    """Counts of documents for people: of each source and split that has changes, and of all."""
    if changes.documents is not None:
        yield from ((source_called(counts.name), counts) for counts in changes.documents.by_source)
        yield from ((f"split {counts.name}", counts) for counts in changes.documents.by_split)
        yield "all documents", changes.documents.total


def _told(counts: DocumentChangeCounts) -> str:
    changed = "unknown how many" if counts.changed is None else f"{counts.changed:,}"
    return f"{counts.added:,} added, {counts.removed:,} removed, {changed} changed, {counts.moved:,} moved to another source"


def _step(pair: tuple[int | None, int | None]) -> str:
    if pair == (None, None):
        return "unknown"
    was, now = (count or 0 for count in pair)
    return f"{now:,} ({now - was:+,})" if now != was else f"{now:,}"


def as_markdown(changes: Changes) -> str:
    """Text for a Prefect artifact. Lists: the UI cuts off what is wider than a phone in tables."""
    changes = Changes.model_validate(markdown(changes.model_dump()))
    lines = [changes.headline[0].upper() + changes.headline[1:] + ".", ""]
    lines += [
        f"- {source_called(one.name)}: documents {_step(one.documents)}, tokens {_step(one.tokens)}, files {_step(one.files)}"
        for one in changes.sources
    ]
    if changes.documents is not None:
        lines += ["", "Documents:", ""]
        lines += [f"- {name}: {_told(one)}" for name, one in _document_counts(changes)]
        lines += [f"- **changed their split: {changes.documents.split_changes}**"] if changes.documents.of_splits else []
    if changes.files:
        lines += ["", "Files:", ""]
        for change in changes.files[:SHOWN_FILES]:
            was = f" (was `{change.former_name}`)" if change.former_name else ""
            digest = " → ".join(f"`{sha256[:12]}`" for sha256 in (change.former_sha256, change.sha256) if sha256)
            lines.append(f"- {change.kind}: {change.source}, `{change.name}`{was}, {digest}")
        if len(changes.files) > SHOWN_FILES:
            lines.append(f"- … and {len(changes.files) - SHOWN_FILES:,} more")
    return "\n".join(lines) + "\n"
