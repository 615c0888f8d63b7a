"""Tables as sources: Delta Lake and Iceberg. A table becomes a pinned list of the data files of one of its versions. They are
read like other Parquet files, unless the table has removed rows of one, or has other names for its columns: then its rows are
rewritten, as the table has them, before anything else reads it.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.partitions import NULL, partitions_of
from flat_tokens.text.rows import check_columns
from tasks.config import Source
from tasks.download import delta, iceberg
from tasks.download.table_versions import DataFile, TableVersion, as_text_file, columns_of, reading
from tasks.locations import local_path, readable, readable_directory
from tasks.models import FoundFile, PinnedSource, digest_of, stamp_of, version_of

TABLE = "table://"
"""How the URI of a data file begins whose rows are rewritten."""
KINDS: dict[str, Any] = {"delta": delta, "iceberg": iceberg}


def resolve_table(source: Source, index: int) -> PinnedSource:
    """The data files of a table's version, the oldest first. ValueError, naming table and version, if it cannot be read."""
    kind = kind_of_table(source)
    what = f"{source.called}: {kind.title()} table {source.table}" + (f" of catalog {source.catalog}" if source.catalog else "")
    table: TableVersion = reading(what, partial(KINDS[kind].version_of_table, source, what))
    what = f"{what}, version {table.version}"
    check_columns(as_text_file(source, what), table.schema)
    # What is appended changes the last slice of small files, whatever the writer called its files.
    listed = sorted(table.files, key=lambda file: (file.since, file.uri))
    if not listed:
        raise ValueError(f"{what} has no files. Write rows to it, or choose another version: source.version")
    here, below, columns = local_path(table.directory), table.directory.rstrip("/") + "/", columns_of(source)
    files = list[FoundFile]()
    for data, found in zip(listed, _in_store(listed) if here is None else _on_disk(listed), strict=True):
        if found is None:
            raise ValueError(
                f"{what} needs the file {data.uri}, which is gone: the table was vacuumed, or its snapshot expired. Set "
                "source.version to a newer version, or restore the file."
            )
        path = data.uri.removeprefix(below) if data.uri.startswith(below) else posixpath.basename(data.uri)
        found = found._replace(source=index, name=name_of(path, data.partition))
        if data.changed:
            facts = {"kind": kind, "place": table.place, "version": table.version, "file": data.uri, "columns": columns}
            uri = f"{TABLE}{kind}?{quote(json.dumps(facts, sort_keys=True))}"
            changed = digest_of(data.changed, found.uri, found.immutable, found.stamp, columns)
            found = found._replace(uri=uri, immutable=changed, stamp=())
        files.append(found)
    place = table.directory if here is None else f"local files ({PurePosixPath(here).name or 'directory'})"
    return PinnedSource(origin=f"{place} ({kind.title()} table)", revision=table.version, files=tuple(files))


def kind_of_table(source: Source) -> str:
    """``delta`` or ``iceberg``: as the source says, else by what is in the table's directory."""
    assert source.table is not None
    if source.format != "auto":
        return source.format
    if source.catalog is not None or source.table.endswith(".metadata.json"):
        return "iceberg"
    has_log = partial(Store.at(source.table).exists, "_delta_log")
    return "delta" if reading(f"{source.called}: table {source.table}", has_log) else "iceberg"


def name_of(path: str, partition: Mapping[str, str | None]) -> str:
    """The name of a data file, whose directories give the columns of its partition, as those of other sources do."""
    if partition.items() <= partitions_of(path).items():
        return path
    own = [part for part in path.split("/")[:-1] if "=" not in part]
    given = [f"{quote(key, safe='')}={NULL if value is None else quote(value, safe='')}" for key, value in partition.items()]
    return "/".join((*own, *given, posixpath.basename(path)))


def _on_disk(files: Sequence[DataFile]) -> Iterator[FoundFile | None]:
    """Data files of this machine, each with its stamp; None for one that is gone."""
    directories = dict[str, str]()
    for file in files:
        path = local_path(file.uri)
        assert path is not None
        head, _, name = path.rpartition("/")
        try:
            if head not in directories:
                directories[head] = readable_directory(head)
            status = os.stat(directories[head] + name)
        except FileNotFoundError:
            yield None
            continue
        yield FoundFile(0, "", directories[head] + name, status.st_size, stamp=stamp_of(status))


def _in_store(files: Sequence[DataFile]) -> Iterator[FoundFile | None]:
    """Data files of a store, with its names for their contents, by one listing of the directory that has them all."""
    store = Store.at(readable(files[0].uri))
    paths = [store.fs._strip_protocol(readable(file.uri)) for file in files]
    store.fs.invalidate_cache()
    try:
        infos = replace(store, root=posixpath.commonpath(map(posixpath.dirname, paths))).ask("find", detail=True)
    except NO_OBJECT:
        infos = {}
    for file, path in zip(files, paths, strict=True):
        info = infos.get(path)
        yield info and FoundFile(0, "", file.uri, info.get("size"), immutable=version_of(info))


def write_rows(found: FoundFile, file: BinaryIO) -> str:
    """Write the rows of a data file as its table has them, as Parquet. Return the sha256."""
    import pyarrow.parquet as pq

    facts = json.loads(unquote(found.uri.partition("?")[2]))
    what = f"{facts['kind'].title()} table {facts['place']}, version {facts['version']}: {facts['file']}"

    def write() -> None:
        batches = KINDS[facts["kind"]].rows_of(facts["place"], facts["version"], facts["file"], tuple(facts["columns"]))
        schema = next(batches)
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for batch in batches:
                writer.write_batch(batch)

    reading(what, write)
    file.flush()
    return Store.at(posixpath.dirname(file.name)).digest(posixpath.basename(file.name), "sha256").hexadecimal
