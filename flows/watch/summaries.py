"""Summaries of runs in the Prefect UI: tables and links, and the result as an asset with the assets that it was made of. If
the server does not answer, the run ends all the same. A build that had nothing to do is recorded as a run with what a flow
would leave there, without Prefect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from flat_tokens import DamagedError, Verification
from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.checker import faults_found
from flat_tokens.manifest import POINTER, counts_of, read_manifest, splits_of
from flat_tokens.reader import resolve
from flat_tokens.stores.store import Store, StoredObject, stored_object
from flat_tokens.tools.export import ExportRequest, ExportResult
from flat_tokens.tools.inspect import set_reports
from flat_tokens.tools.terminal import duration, percent, plural, size, speed
from flat_tokens.tools.terminal import markdown as as_markdown
from flat_tokens.tools.terminal import short as short_count
from flows.pipelines.build import BuildResult
from flows.pipelines.derive import DerivedResult
from flows.pipelines.exchange import ImportResult
from flows.pipelines.publish import PublishResult
from flows.pipelines.to_hub import HubResult
from flows.pipelines.train_tokenizer import VocabularyResult
from flows.watch.api import Api, Run, ask, complete, parse_time, put_artifact
from flows.watch.page import DRAWN, bring_up_to_date, link_to_page, show_held
from flows.watch.pictures import Bar, bars, code, link, page, table
from flows.watch.words import TAG, UNCHANGED, WITHOUT_PROGRESS, all_done, logging_errors, short, slug, tags_of
from tasks.config import BuildConfig, Source
from tasks.derive.request import DeriveRequest, ImportRequest
from tasks.finalize.facts import near_duplicates, reasons_of, share_near
from tasks.output.paths import VERSIONS
from tasks.progress import Progress, meter

SHOWN_FILES = 20
"""Of an export's or import's files; the others are in its record."""


def leave(name: str, markdown: str, description: str) -> None:
    """Leave a text in Markdown on the run's page. *name* is the same for runs that do the same to the same."""
    from prefect.artifacts import create_markdown_artifact  # here, as below: a build that has nothing to do does not wait for it

    create_markdown_artifact(key=slug(name), markdown=markdown, description=as_markdown(description))


def show(config: BuildConfig, result: BuildResult, name: str | None = None) -> None:
    """Leave a summary of a build under *name*, else its own, and the dataset as an asset that was made of its sources."""
    tokenizer, name = short(config.tokenizer.name), name or config.name
    with logging_errors("summary"):
        leave(f"{name}-summary", summary(config, result, name), counted(result))
    show_held(name, Store.at(config.output).url, result)
    if result.held is not None:
        return
    with logging_errors("asset"):
        made_of = {origin(source): source.name for source in config.sources}
        description = f"Tokens of {', '.join(made_of.values())} by {tokenizer}"
        record_asset(Store.at(config.output).url, config.name, description, made_of, {**_facts(result), "tokenizer": tokenizer})


@logging_errors("summary")
def show_derived(request: DeriveRequest, result: DerivedResult) -> None:
    """Leave a summary of a derived dataset, and it as an asset that was made of its inputs."""
    from flows.watch.progress import dataset_name

    made_of = read_manifest(Store.at(result.path))["provenance"]
    name, inputs = made_of["name"], {path: dataset_name(path) for path in request.inputs}
    leave(f"{name}-{result.operation}-summary", derived(made_of, result), counted(result))
    outputs = {output_of(path): of for path, of in inputs.items()}
    description = f"{result.operation.capitalize()} of {', '.join(inputs.values())}"
    record_asset(Store.at(request.output).url, name, description, outputs, {**_facts(result), "operation": result.operation})


@logging_errors("summary")
def show_import(request: ImportRequest, result: ImportResult) -> None:
    """Leave a summary of an import, and the dataset as an asset that was made of the files."""
    made_of = read_manifest(Store.at(result.path))["provenance"]
    name, files = made_of["name"], {Store.at(request.path).url: made_of["name"]}
    leave(f"{name}-import-summary", imported(request, made_of, result), counted(result))
    description = f"Tokens of {result.format} files"
    record_asset(Store.at(request.output).url, name, description, files, {**_facts(result), "format": result.format})


def show_export(name: str, request: ExportRequest, result: ExportResult) -> None:
    """Leave a summary of the export of a dataset of that name, and the files as an asset that was made of it."""
    with logging_errors("summary"):
        leave(f"{name}-export-summary", exported(name, request, result), f"{_amount(result.objects)}: {result.path}")
    with logging_errors("asset"):
        facts = {"path": result.path, "format": result.format, "files": len(result.objects), "bytes": result.byte_count}
        made_of = {output_of(request.location): name}
        record_asset(result.path, f"{name} as {result.format}", f"{result.format} files of {name}", made_of, facts)


@logging_errors("summary")
def show_publication(name: str, result: HubResult) -> None:
    """Leave a summary of a publication on the hub of a dataset of that name."""
    text = page(
        f"# {as_markdown(name)} on the hub",
        f"Version `{result.version}` as {result.form}: [{as_markdown(result.url)}]({result.url}/tree/{result.version}).",
        f"{as_markdown(result.headline)}.",
        _seconds(result.seconds),
    )
    leave(f"{name}-publish-summary", text, result.headline)


@logging_errors("summary")
def show_vocabularies(name: str, result: VocabularyResult) -> None:
    """Leave a summary of tokenizers that were trained on a dataset of that name."""
    rows = [(f"`{as_markdown(one.path)}`", one.vocab_size, one.merges) for one in result.vocabularies]
    text = page(
        f"# Tokenizers of {as_markdown(name)}",
        f"{as_markdown(result.headline)}.",
        table("directory | #ids | #merges", rows),
        _seconds(result.seconds),
    )
    leave(f"{name}-tokenizer-summary", text, result.headline)


@logging_errors("summary")
def show_check(name: str, level: str, found: Verification | DamagedError, how_far: Progress) -> None:
    """Leave a summary of a check of a dataset of that name."""
    result = "right" if isinstance(found, Verification) else f"damaged, {faults_found(len(found.faults))}"
    leave(f"{name}-verify-summary", checked(name, level, found, how_far), f"{result} ({level}): {found.path}")


def record_asset(location: str, name: str, description: str, made_of: Mapping[str, str], facts: JsonObject) -> None:
    """Record an asset and the assets that it was made of, within a flow run. *made_of*: location -> name."""
    from prefect.assets import Asset, AssetProperties, materialize
    from prefect.cache_policies import NO_CACHE

    url = location if location.startswith(("http://", "https://")) else None
    made = Asset(key=asset_key(location), properties=AssetProperties(name=name, url=url, description=as_markdown(description)))
    deps = {asset_key(place): Asset(key=asset_key(place), properties=AssetProperties(name=of)) for place, of in made_of.items()}
    deps.pop(made.key, None)  # an append to itself

    @materialize(made, asset_deps=[*deps.values()], task_run_name="publish {what}", cache_policy=NO_CACHE, persist_result=False)
    def publish(what: str) -> str:
        made.add_metadata(facts)
        return what

    publish(str(facts.get("version", name)))


def origin(source: Source) -> str:
    """URL or path of a source."""
    if source.hub is not None:
        name = f"/{source.hub.name}" if source.hub.name else ""
        return f"hf://datasets/{source.hub.path}{name}/{source.hub.split}"
    return Store.at(source.place).url if "://" not in source.place else source.place


def output_of(path_or_url: str) -> str:
    """The output of the dataset at a path, or the path itself if it has none."""
    store = Store.at(path_or_url)
    place = store.url if store.exists(POINTER) else resolve(store).url
    above = place.rpartition("/")[0]
    return above.removesuffix(f"/{VERSIONS}") if above.endswith(f"/{VERSIONS}") else place


def asset_key(location: str) -> str:
    """A path or URL as the name of an asset, which may not hold all that a path may."""
    url = location if "://" in location else f"file://{location}"
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{re.sub(r'[^A-Za-z0-9/@:._*=+,~-]+', '-', rest)}"[:512]


def summary(config: BuildConfig, result: BuildResult, name: str) -> str:
    """A build in Markdown: its version, sources and documents, and a link to the page of the dataset *name*."""
    documents = as_markdown(result.totals["documents"])
    dropped = documents["skipped"].get("duplicate", 0)
    rows, links = [*documents.get("by_source", ())], {source.name: _link_to(source) for source in config.sources}
    if len(rows) > 1:
        whole = {name: sum(row[name] for row in rows) for name in ("read", "written", "text_bytes", "token_count")}
        rows.append({"name": "**all**", **whole, "skipped": documents["skipped"]})
    largest = sorted(result.totals["documents"].get("by_source", ()), key=lambda row: -row["token_count"])[:DRAWN]
    return page(
        f"# {config.name}",
        f"{_published(result)}, tokenizer {code(short(config.tokenizer.name))}. {BESIDE} {link_to_page(name)}.",
        _splits(result),
        [_of_source(row, links.get(row["name"])) for row in rows],
        bars("Tokens by source", [Bar(row["name"], row["token_count"], short_count(row["token_count"])) for row in largest]),
        _steps(config, result.totals["documents"]),
        f"Duplicates: {plural(dropped, 'document')} with the text of an earlier one are left out."
        if config.documents.duplicates == "drop"
        else "",
        _near_duplicates(config, documents),
        f"Kept columns: {', '.join(map(code, config.kept_columns))}." if config.kept_columns else "",
        f"Repaired: {_counts(documents['replaced'])}." if documents.get("replaced") else "",
        _repeated(documents),
        f"**{plural(result.equal_texts_apart, 'document')} outside train with a text that another split has, too.** "
        "`split: {by: text}` puts equal texts into one split."
        if result.equal_texts_apart
        else "",
        ""
        if result.was_published
        else f"{result.slices_reused:,} of {plural(result.slices, 'slice')} were taken from earlier builds.",
        _seconds(result.seconds),
    )


def _of_source(row: JsonObject, link_to: str | None) -> str:
    """A line of a list. A table of so many columns would be cut off on the right."""
    rate = f", {row['text_bytes'] / row['token_count']:.2f} bytes a token" if row["token_count"] else ""
    counts = f"{plural(row['read'], 'document')} read, {row['written']:,} written, {_counts(row['skipped']) or 'none'} skipped"
    of_text = f"{row['token_count']:,} tokens of {size(row['text_bytes'])} of text{rate}"
    return f"- {row['name']}: {counts}; {of_text}{f'. {link_to}' if link_to else ''}"


def _steps(config: BuildConfig, documents: JsonFacts) -> list[str]:
    """A list of the steps of a build: the texts that each left out or changed, and what it found."""
    rows, reports = list[str](), set_reports((), documents)
    for step in config.documents.opened().described:
        name = step["name"]
        skipped, replaced = (reasons_of(name, documents[counts]) for counts in ("skipped", "replaced"))
        why = f" ({_counts(as_markdown(skipped))})" if skipped else ""
        rows.append(f"- step {code(name)}: {sum(skipped.values()):,} left out{why}, {sum(replaced.values()):,} changed")
        for one in reports:
            if one.step == name:
                rows.append(f"- evaluation set {as_markdown(one.sentence)}")
                rows += [f"  - {as_markdown(line)}" for line in one.lines()]
    return rows


def _near_duplicates(config: BuildConfig, documents: JsonFacts) -> list[str]:
    """The near-duplicates of a build, and their share in each source that has some."""
    if config.documents.near_duplicates is None:
        return []
    fate = "are left out" if config.documents.near_duplicates.action == "drop" else "are kept, with their clusters"
    found, rows = near_duplicates(documents), documents.get("by_source", ())
    lines = [f"Near-duplicates: {plural(found, 'document')} with nearly the text of another one {fate}."]
    lines += [
        f"- {row['name']}: {count:,} near-duplicates, {percent(share_near(row, row['read']))} of what was read"
        for row in rows
        if (count := near_duplicates(row)) and len(rows) > 1
    ]
    return lines


def derived(made_of: JsonObject, result: DerivedResult) -> str:
    """A derived dataset in Markdown. *made_of*: the manifest's provenance."""
    made_of, documents = as_markdown((made_of, result.totals["documents"]))
    splits = splits_of(result.totals)
    settings = {name: value for name, value in made_of.get("operation", {}).items() if name != "operation"}
    inputs = [
        (
            f"- {one['name']}{f' {version}' if (version := one['version']) else ''}: "
            f"{plural(sum(one['token_counts'].values()), 'token')}, "
        )
        + " and ".join(f"{one['seq_counts'].get(split, 0):,} sequences of {split}" for split in splits)
        for one in made_of.get("inputs", ())
    ]
    sources = ((row["name"], row["written"], row["token_count"]) for row in documents["by_source"])
    return page(
        f"# {made_of['name']}",
        f"{_published(result)}. {BESIDE} {link_to_page(made_of['name'])}.",
        f"{result.operation.capitalize()}{f' ({_plain(settings)})' if settings else ''} of:",
        inputs,
        _splits(result),
        table("source | #documents | #tokens", sources),
        f"{documents['written']:,} of {plural(documents['read'], 'document')}. "
        f"Left out: {_counts(documents['skipped']) or 'none'}.",
        _repeated(documents),
        f"{result.not_found:,} of the list belong to no document." if result.not_found else "",
        _seconds(result.seconds),
    )


def imported(request: ImportRequest, made_of: JsonObject, result: ImportResult) -> str:
    """An import in Markdown. *made_of*: the manifest's provenance."""
    files = [stored_object(part) for file in made_of["sources"][0]["files"] for part in file["parts"]]
    made_of = as_markdown(made_of)
    tokenizer = made_of["tokenizer"].get("name")
    return page(
        f"# {made_of['name']}",
        f"{_published(result)}, {f'tokenizer `{tokenizer}`' if tokenizer else 'by a tokenizer that is not recorded'}. {BESIDE} "
        f"{link_to_page(made_of['name'])}.",
        _splits(result),
        f"Of {result.format} files, {_amount(files)}: {link(Store.at(request.path).url)}",
        _files(files),
        _repeated(result.totals["documents"]),
        ""
        if result.was_published
        else f"{result.parts_reused:,} of {plural(result.parts, 'part')} were taken from an earlier import.",
        _seconds(result.seconds),
    )


def exported(name: str, request: ExportRequest, result: ExportResult) -> str:
    """An export in Markdown: its input and its files."""
    reused = f"{result.reused:,} of {plural(result.parts, 'part')} had been written by an earlier run."
    splits = ((split, tokens.seq_count, tokens.token_count) for split, tokens in request.source().items())
    return page(
        f"# {as_markdown(name)} as {result.format}",
        f"{link(result.path)}: {_amount(result.objects)}, of {link(request.location)}.",
        "There was nothing to do: an earlier run had written all of it." if result.was_done else reused,
        f"The loss mask is not exported: {result.format} has no place for it." if result.loses_loss_mask else "",
        table("split | #sequences | #tokens", splits),
        _files(result.objects),
        f"It took {result.seconds:,.1f} s: {4 * request.token_count / max(result.seconds, 0.1) / 1e6:,.1f} MB of tokens a second."
        if result.seconds
        else "",
    )


def checked(name: str, level: str, found: Verification | DamagedError, how_far: Progress) -> str:
    """A check in Markdown: its level and its faults."""
    if isinstance(found, Verification):
        result = f"{link(found.path)} is what it says, checked {DEPTHS[level]}."
        counts = f"{plural(found.token_count, 'token')} in {plural(found.seq_count, 'sequence')}"
        details = [f"- level {level}: {found.object_count:,} objects of {plural(found.byte_count, 'byte')}, {counts}"]
    else:
        result = f"**{link(found.path)} is damaged**: {faults_found(len(found.faults))}, checked {DEPTHS[level]}."
        details = [f"- {code(fault)}" for fault in found.faults]
    took, read = duration(how_far.seconds), how_far.done.bytes
    took = f"{size(read)} read in {took}, at {speed(how_far.rate)}." if read else f"It took {took}."
    return page(f"# {as_markdown(name)}", result, details, took)


BESIDE = "Its card and manifest are there: `README.md`, `manifest.json`."
DEPTHS = {"quick": "by names, sizes and metadata", "full": "byte by byte and token by token"}


def _published(result: PublishResult) -> str:
    was = f" (it was `{result.moved_from}`)" if result.moved_from else ""
    before = f"was there already, and is the latest now{was}, number {result.sequence}"
    state = f"published, number {result.sequence}" if result.held is None else "waits for a person"
    if result.was_published and result.held is None:
        state = before if result.is_new else "was published already"
    return f"Version `{result.version}` {state}: {link(result.path)}, {size(result.byte_count)} as {result.layout}"


def _splits(result: PublishResult) -> list[str]:
    """A list: the UI cuts off what is wider than a phone in tables."""
    return [f"- {split}: {counts}" for split, counts in result.split_counts.items()]


def _seconds(seconds: Mapping[str, float]) -> list[str]:
    return table("stage | #seconds", ((stage, f"{took:,.1f}") for stage, took in seconds.items())) if seconds else []


def _files(files: Sequence[StoredObject]) -> list[str]:
    rows = [f"- {code(one.key)}, {plural(one.size, 'byte')}, sha256 `{one.digest}`" for one in files[:SHOWN_FILES]]
    if more := files[SHOWN_FILES:]:
        rows.append(f"- and {len(more):,} more, {plural(sum(one.size for one in more), 'byte')}")
    return rows


def _amount(files: Sequence[StoredObject]) -> str:
    return f"{size(sum(one.size for one in files))} in {len(files):,} file{'s' * (len(files) != 1)}"


def _repeated(documents: JsonObject) -> str:
    count = documents.get("repeated_keys")
    return f"{plural(count, 'document')} have the key of another." if count else ""


def _link_to(source: Source) -> str:
    if source.hub is None:
        return link(origin(source))
    name = " ".join(filter(None, (source.hub.path, source.hub.name, source.hub.split)))
    return f"[{as_markdown(name)}](https://huggingface.co/datasets/{quote(source.hub.path)})"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def counted(result: PublishResult) -> str:
    """The counts of a version and its place, in a line."""
    counts = counts_of(result.totals)
    return f"{plural(counts['documents'], 'document')}, {plural(counts['tokens'], 'token')}: {result.path}"


def _facts(result: PublishResult) -> JsonObject:
    return {
        **result.model_dump(include={"version", "path", "layout"}),
        **counts_of(result.totals),
        "bytes": result.byte_count,
    }


FLOW = "build-dataset"
RUN = "build {config.name} with {config.tokenizer.name}"


def record(client: Api, config: BuildConfig, result: BuildResult) -> bool:
    """Record a build as a run that has ended well. False, and nothing is recorded, if the server refuses the run."""
    tags = tags_of(config)
    body = {
        "name": RUN.format(config=config),
        "parameters": {"config": config.model_dump(mode="json"), "publish_anyway": None},
        "tags": sorted([TAG, *tags, *([] if result.is_new else [UNCHANGED])]),
        "state": {"type": "RUNNING"},
    }
    try:
        made = ask(client, "POST", "/flow_runs/", {**body, "flow_id": ask(client, "POST", "/flows/", {"name": FLOW})["id"]})
    except httpx.HTTPError:
        return False
    run = Run(made["id"], made["name"], parse_time(made["start_time"]))
    with logging_errors("progress"):
        for one in meter.stages():
            if one.stage not in WITHOUT_PROGRESS and one.total:
                put_artifact(client, run.id, slug(f"{config.name}-{one.stage}"), "progress", 100.0, f"Done: {all_done(one)}")
    with logging_errors("page of the dataset"):
        bring_up_to_date(client, run, config.name, config.output, tags, is_unchanged=not result.is_new)
    with logging_errors("summary"):
        text, description = summary(config, result, config.name), as_markdown(counted(result))
        put_artifact(client, run.id, slug(f"{config.name}-summary"), "markdown", text, description)
    with logging_errors("end"):
        complete(client, run.id, result.headline)
    return True
