"""Summaries of runs in the Prefect UI: tables and links, and the result as an asset with the assets that it was made of. Where
the server does not answer, the run ends all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.assets import Asset, AssetProperties
from prefect.cache_policies import NO_CACHE
from prefect.tasks import MaterializingTask

from flat_tokens import DamagedError, Verification
from flat_tokens.checker import faults_found
from flat_tokens.manifest import POINTER, SPLITS, read_manifest
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.export import ExportRequest
from flat_tokens.tools.terminal import duration, size
from flows.pipelines.build import BuildResult
from flows.pipelines.derive import DerivedResult
from flows.pipelines.export import ExportResult
from flows.pipelines.import_ import ImportResult
from flows.pipelines.publish import Published
from flows.watch.progress import dataset_name, short, slug, tolerated
from tasks.config import BuildConfig, Source
from tasks.derive.inputs import version_at
from tasks.derive.request import DeriveRequest, ImportRequest
from tasks.output.paths import VERSIONS
from tasks.progress import Progress

SHOWN_FILES = 20
"""Of an export's or import's files; the others are in its record."""


def leave(name: str, markdown: str, description: str) -> None:
    """Leave a text in Markdown on the run's page. *name* is the same for runs that do the same to the same."""
    create_markdown_artifact(key=slug(name), markdown=markdown, description=description)


def show(config: BuildConfig, result: BuildResult, name: str | None = None) -> None:
    """Leave a summary of a build, and the dataset as an asset that was made of its sources. *name*: instead of its own, where a
    run builds several.
    """
    tokenizer = short(config.tokenizer.name)
    with tolerated("summary"):
        leave(f"{name or config.name}-summary", summary(config, result), _counted(result))
    with tolerated("asset"):
        made_of = {origin(source): source.name for source in config.sources}
        description = f"Tokens of {', '.join(made_of.values())} by {tokenizer}"
        materialize(Store.at(config.output).url, config.name, description, made_of, {**_facts(result), "tokenizer": tokenizer})


def show_derived(request: DeriveRequest, result: DerivedResult) -> None:
    """Leave a summary of a derived dataset, and it as an asset that was made of its inputs."""
    with tolerated("summary"):
        made_of = read_manifest(Store.at(result.path))["provenance"]
        name, inputs = made_of["name"], {path: dataset_name(path) for path in request.inputs}
        leave(f"{name}-{result.operation}-summary", derived(made_of, result), _counted(result))
        outputs = {output_of(path): of for path, of in inputs.items()}
        description = f"{result.operation.capitalize()} of {', '.join(inputs.values())}"
        materialize(Store.at(request.output).url, name, description, outputs, {**_facts(result), "operation": result.operation})


def show_import(request: ImportRequest, result: ImportResult) -> None:
    """Leave a summary of an import, and the dataset as an asset that was made of the files."""
    with tolerated("summary"):
        made_of = read_manifest(Store.at(result.path))["provenance"]
        name, files = made_of["name"], {Store.at(request.path).url: made_of["name"]}
        leave(f"{name}-import-summary", imported(request, made_of, result), _counted(result))
        description = f"Tokens of {result.format} files"
        materialize(Store.at(request.output).url, name, description, files, {**_facts(result), "format": result.format})


def show_export(name: str, request: ExportRequest, result: ExportResult) -> None:
    """Leave a summary of the export of a dataset of that name, and the files as an asset that was made of it."""
    with tolerated("summary"):
        leave(f"{name}-export-summary", exported(name, request, result), f"{_amount(result.objects)}: {result.path}")
    with tolerated("asset"):
        materialize(
            result.path,
            f"{name} as {result.format}",
            f"{result.format} files of {name}",
            {output_of(request.location): name},
            {"path": result.path, "format": result.format, "files": len(result.objects), "bytes": result.byte_count},
        )


def show_check(name: str, level: str, found: Verification | DamagedError, how_far: Progress) -> None:
    """Leave a summary of a check of a dataset of that name."""
    with tolerated("summary"):
        result = "right" if isinstance(found, Verification) else f"damaged, {faults_found(len(found.faults))}"
        leave(f"{name}-verify-summary", checked(name, level, found, how_far), f"{result} ({level}): {found.path}")


def materialize(location: str, name: str, description: str, made_of: Mapping[str, str], facts: dict[str, Any]) -> None:
    """Record an asset and the assets that it was made of, within a flow run. *made_of*: location -> name."""
    made = Asset(
        key=asset_key(location),
        properties=AssetProperties(
            name=name, url=location if location.startswith(("http://", "https://")) else None, description=description
        ),
    )
    deps = {asset_key(place): Asset(key=asset_key(place), properties=AssetProperties(name=of)) for place, of in made_of.items()}
    deps.pop(made.key, None)  # an append to itself

    def publish(what: str) -> str:
        made.add_metadata(facts)
        return what

    task = MaterializingTask(
        publish,
        assets=[made],
        asset_deps=[*deps.values()],
        name="publish",
        task_run_name="publish {what}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    task(str(facts.get("version", name)))


def origin(source: Source) -> str:
    """URL or path of a source."""
    if source.hub is not None:
        name = f"/{source.hub.name}" if source.hub.name else ""
        return f"hf://datasets/{source.hub.path}{name}/{source.hub.split}"
    assert source.path is not None
    return Store.at(source.path).url if "://" not in source.path else source.path


def output_of(path_or_url: str) -> str:
    """The output of the dataset at a path, or the path itself where it has none."""
    store = Store.at(path_or_url)
    place = store.url if store.exists(POINTER) else version_at(path_or_url).url
    above = place.rpartition("/")[0]
    return above.removesuffix(f"/{VERSIONS}") if above.endswith(f"/{VERSIONS}") else place


def asset_key(location: str) -> str:
    """A path or URL as the name of an asset, which may not hold all that a path may."""
    url = location if "://" in location else f"file://{location}"
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{re.sub(r'[^A-Za-z0-9/@:._*=+,~-]+', '-', rest)}"[:512]


def link(location: str) -> str:
    """A place in Markdown: a link where a browser can follow it, else the place itself."""
    scheme, _, path = location.partition("://")
    match scheme:
        case "http" | "https":
            return f"[{location}]({location})"
        case "hf" if repository := re.match(r"datasets/[^/@]+/[^/@]+", path):
            return f"[{location}](https://huggingface.co/{repository[0]})"
        case "gs" | "gcs":
            return f"[{location}](https://console.cloud.google.com/storage/browser/{path})"
        case "s3" | "s3a":
            bucket, _, prefix = path.partition("/")
            return f"[{location}](https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={prefix.rstrip('/')}/)"
    return f"`{location}`"


def summary(config: BuildConfig, result: BuildResult) -> str:
    """A build in Markdown: its version, sources and documents."""
    documents = result.totals["documents"]
    rows = [*documents.get("by_source", ())]
    if len(rows) > 1:
        whole = {name: sum(row[name] for row in rows) for name in ("read", "written", "text_bytes", "token_count")}
        rows.append({"name": "**all**", **whole, "skipped": documents["skipped"]})
    lines = [
        f"# {config.name}",
        "",
        f"{_published(result)}, tokenizer `{short(config.tokenizer.name)}`. {BESIDE}",
        "",
        *_splits(result.totals),
        "",
        "| source | documents read | written | skipped | tokens | text | bytes per token |",
        "|---|---:|---:|---|---:|---:|---:|",
        *(_row(row) for row in rows),
        "",
        *(f"- {source.name}: {_link_to(source)}" for source in config.sources),
        "",
    ]
    if documents.get("replaced"):
        lines += [f"Mended: {_counts(documents['replaced'])}.", ""]
    lines += _repeated(documents)
    if not result.was_published:
        lines += [f"{result.slices_reused:,} of {result.slices:,} slices were taken from earlier builds.", ""]
    return "\n".join([*lines, *_seconds(result.seconds)]) + "\n"


def derived(made_of: dict[str, Any], result: DerivedResult) -> str:
    """A derived dataset in Markdown. *made_of*: the manifest's provenance."""
    documents = result.totals["documents"]
    settings = {name: value for name, value in made_of.get("operation", {}).items() if name != "operation"}
    lines = [
        f"# {made_of['name']}",
        "",
        f"{_published(result)}. {BESIDE}",
        "",
        f"{result.operation.capitalize()}{f' ({_settings(settings)})' if settings else ''} of:",
        "",
        "| dataset | version | train sequences | validation sequences | tokens |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {one['name']} | {one['version'] or ''} | {one['seq_counts']['train']:,} | {one['seq_counts']['validation']:,} "
            f"| {sum(one['token_counts'].values()):,} |"
            for one in made_of.get("inputs", ())
        ),
        "",
        *_splits(result.totals),
        "",
        "| source | documents | tokens |",
        "|---|---:|---:|",
        *(f"| {row['name']} | {row['written']:,} | {row['token_count']:,} |" for row in documents["by_source"]),
        "",
        f"{documents['written']:,} of {documents['read']:,} documents. Left out: {_counts(documents['skipped']) or 'none'}.",
        "",
        *_repeated(documents),
    ]
    if result.not_found:
        lines += [f"{result.not_found:,} of the list are no document's.", ""]
    return "\n".join([*lines, *_seconds(result.seconds)]) + "\n"


def imported(request: ImportRequest, made_of: dict[str, Any], result: ImportResult) -> str:
    """An import in Markdown. *made_of*: the manifest's provenance."""
    files = [StoredObject(**part) for file in made_of["sources"][0]["files"] for part in file["parts"]]
    tokenizer = made_of["tokenizer"].get("name")
    lines = [
        f"# {made_of['name']}",
        "",
        f"{_published(result)}, {f'tokenizer `{tokenizer}`' if tokenizer else 'by a tokenizer that is not recorded'}. {BESIDE}",
        "",
        *_splits(result.totals),
        "",
        f"Of {result.format} files, {_amount(files)}: {link(Store.at(request.path).url)}",
        "",
        *_files(files),
        "",
        *_repeated(result.totals["documents"]),
    ]
    if not result.was_published:
        lines += [f"{result.parts_reused:,} of {result.parts:,} parts were taken from an earlier import.", ""]
    return "\n".join([*lines, *_seconds(result.seconds)]) + "\n"


def exported(name: str, request: ExportRequest, result: ExportResult) -> str:
    """An export in Markdown: its input and its files."""
    reused = "There was nothing to do: an earlier run had written all of it."
    if not result.was_done:
        reused = f"{result.reused:,} of {result.parts:,} parts had been written by an earlier run."
    took = result.seconds.get("export", 0.0)
    source = request.source()
    lines = [
        f"# {name} as {result.format}",
        "",
        f"{link(result.path)}: {_amount(result.objects)}, of {link(request.location)}.",
        "",
        reused,
        "",
        "| split | sequences | tokens |",
        "|---|---:|---:|",
        *(f"| {split} | {tokens.seq_count:,} | {tokens.token_count:,} |" for split, tokens in source.items()),
        "",
        *_files(result.objects),
        "",
        *_seconds(result.seconds),
    ]
    if took:
        lines += ["", f"{4 * request.token_count / max(took, 0.1) / 1e6:,.1f} MB of tokens a second."]
    return "\n".join(lines) + "\n"


def checked(name: str, level: str, found: Verification | DamagedError, how_far: Progress) -> str:
    """A check in Markdown: its level and its faults."""
    read = f"{size(how_far.done.bytes)} read in {duration(how_far.seconds)}, at {how_far.rate / 1e6:,.1f} MB/s."
    lines = [f"# {name}", ""]
    if isinstance(found, Verification):
        lines += [
            f"{link(found.path)} is what it says, checked {DEPTHS[level]}.",
            "",
            "| level | objects | bytes | tokens | sequences |",
            "|---|---:|---:|---:|---:|",
            f"| {level} | {found.object_count:,} | {found.byte_count:,} | {found.token_count:,} | {found.seq_count:,} |",
        ]
    else:
        lines += [
            f"**{link(found.path)} is damaged**: {faults_found(len(found.faults))}, checked {DEPTHS[level]}.",
            "",
            *(f"- {_code(fault)}" for fault in found.faults),
        ]
    return "\n".join([*lines, "", read if how_far.done.bytes else f"It took {duration(how_far.seconds)}."]) + "\n"


BESIDE = "Its card and manifest lie there: `README.md`, `manifest.json`."
DEPTHS = {"quick": "by names, sizes and metadata", "full": "byte by byte and token by token"}


def _published(result: Published) -> str:
    state = "was published already" if result.was_published else f"published, number {result.sequence}"
    return f"Version `{result.version}` {state}: {link(result.path)}, {size(result.byte_count)} as {result.layout}"


def _splits(totals: dict[str, Any]) -> Iterator[str]:
    yield "| split | sequences | tokens | largest id |"
    yield "|---|---:|---:|---:|"
    for split in SPLITS:
        facts = totals[split]
        yield f"| {split} | {facts['seq_count']:,} | {facts['token_count']:,} | {facts['max_token_id']:,} |"


def _seconds(seconds: Mapping[str, float]) -> Iterator[str]:
    if seconds:
        yield "| stage | seconds |"
        yield "|---|---:|"
    for stage, took in seconds.items():
        yield f"| {stage} | {took:,.1f} |"


def _files(files: Sequence[StoredObject]) -> Iterator[str]:
    yield "| file | bytes | sha256 |"
    yield "|---|---:|---|"
    for one in files[:SHOWN_FILES]:
        yield f"| {_code(one.key)} | {one.size:,} | `{one.sha256}` |"
    if len(files) > SHOWN_FILES:
        yield f"| and {len(files) - SHOWN_FILES:,} more | {sum(one.size for one in files[SHOWN_FILES:]):,} | |"


def _amount(files: Sequence[StoredObject]) -> str:
    return f"{size(sum(one.size for one in files))} in {len(files):,} file{'s' * (len(files) != 1)}"


def _repeated(documents: dict[str, Any]) -> list[str]:
    count = documents.get("repeated_keys")
    return [f"{count:,} documents have the key of another.", ""] if count else []


def _link_to(source: Source) -> str:
    if source.hub is None:
        return link(origin(source))
    return f"[{' '.join(filter(None, (source.hub.path, source.hub.name, source.hub.split)))}]" + (
        f"(https://huggingface.co/datasets/{source.hub.path})"
    )


def _row(row: dict[str, Any]) -> str:
    ratio = f"{row['text_bytes'] / row['token_count']:.2f}" if row["token_count"] else "–"
    return (
        f"| {row['name']} | {row['read']:,} | {row['written']:,} | {_counts(row['skipped']) or '0'} | {row['token_count']:,} "
        f"| {size(row['text_bytes'])} | {ratio} |"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in settings.items())


def _plain(value: Any) -> str:
    match value:
        case dict():
            return _settings(value)
        case list() | tuple():
            return ", ".join(map(str, value))
    return str(value)


def _code(text: str) -> str:
    """Text as it is, whatever it holds; no line of a table ends in it."""
    return "`" + text.replace("`", "'").replace("|", "/").replace("\n", " ") + "`"


def _counted(result: Published) -> str:
    return f"{_sum(result, 'seq_count'):,} documents, {_sum(result, 'token_count'):,} tokens: {result.path}"


def _facts(result: Published) -> dict[str, Any]:
    return {
        **result.model_dump(include={"version", "path", "layout"}),
        "documents": _sum(result, "seq_count"),
        "tokens": _sum(result, "token_count"),
        "bytes": result.byte_count,
    }


def _sum(result: Published, fact: str) -> int:
    return sum(int(result.totals[split][fact]) for split in SPLITS)
