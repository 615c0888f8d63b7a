"""``flat-tokens documents``: the documents that a dataset was made of, where each is, and why others are in no split; and queries
over documents by duckdb, which writes to a scratch directory what does not fit into memory. Readers need none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flat_tokens.annotations import JsonObject
from flat_tokens.columns import in_json
from flat_tokens.extras import LazyModule, pa
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.reader import document_table
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.rows.where import parse
from flat_tokens.stores.local import kind_of
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, open_corpus

duckdb: Any = LazyModule("duckdb", "comparing documents")

MEMORY = "1GB"
THREADS = 2

SUMMARY = "list the documents that a dataset was made of: where each is, and why others are in no split"
EXAMPLES = """\
examples:
  flat-tokens documents out/web                                   a line for each document
  flat-tokens documents out/web --where "reason = 'duplicate'" --columns key,file,row,of
  flat-tokens documents out/web --where "of is not null" --json   duplicates and near-duplicates that were left out
  flat-tokens documents out/web --to documents.parquet            the table, for duckdb, polars, pandas
"""


ARGUMENTS = """
PATH  a dataset, or a build's output
--where EXPRESSION  the documents for which it is true, such as split = 'validation'
--columns NAMES  these columns, with commas between them, instead of all
--to FILE.parquet  write a Parquet file instead, which must not be there
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "documents", run, SUMMARY, EXAMPLES, ARGUMENTS)


def run(options: argparse.Namespace) -> int:
    table, where = table_of(open_corpus(options.path)), None if options.where is None else parse(options.where)
    names = None if options.columns is None else [name.strip() for name in options.columns.split(",")]
    shown, batches, count = names or table.schema.names, table.batches(names, where), 0
    with contextlib.ExitStack() as stack:
        writer = None
        if options.to is not None:
            if not options.to.endswith(".parquet"):
                raise ValueError(f"{options.to}: a Parquet file is written. Name it {os.path.splitext(options.to)[0]}.parquet")
            if kind_of(options.to) is not None:
                raise FileExistsError(f"{options.to}: exists already. Remove it, or name another file")
            part, schema = f"{options.to}.part", pa.schema([table.schema.field(name) for name in shown])
            writer = pa.parquet.ParquetWriter(part, schema)
            stack.callback(Path(part).unlink, missing_ok=True)  # what fails leaves no file
            stack.enter_context(writer)
        elif not options.json:
            print("\t".join(shown))
        for batch in batches:
            count += len(batch)
            if writer is not None:
                writer.write_batch(batch)
                continue
            for row in batch.to_pylist():
                print(_line(row, options.json))
        if writer is not None:
            writer.close()
            os.rename(part, options.to)
    if options.to is not None:
        print(f"{options.to}: {terminal.plural(count, 'document')}")
    if table.unknown:
        cli.warn(table.unknown)
    return cli.SAME if count else cli.DIFFERENT


def table_of(corpus: Corpus) -> DocumentTable:
    """The table of a dataset's documents. ValueError for anything else."""
    if corpus.format != FLAT_TOKENS or not corpus.manifest or "shard" in corpus.splits:
        raise ValueError(
            f"{corpus.url}: is a {corpus.kind}, which has no record of documents. Name a dataset or a build's output."
        )
    return document_table(corpus.store, corpus.splits)


def _line(row: JsonObject, as_json: bool) -> str:
    if as_json:
        row = {name: in_json(value) for name, value in row.items()}
        return json.dumps(row, ensure_ascii=False).translate(terminal.JSON_ESCAPES)
    return "\t".join("" if value is None else terminal.line(str(value)) for value in row.values())


@contextlib.contextmanager
def connection() -> Iterator[Any]:
    """A connection with a scratch directory that goes with it. Nothing is loaded from elsewhere, and no file is read. OSError,
    naming the directory, if it has no room.
    """
    with tempfile.TemporaryDirectory(prefix="query-") as scratch:
        room = os.statvfs(scratch)
        settings = {
            "threads": THREADS,
            "memory_limit": MEMORY,
            "temp_directory": scratch,
            "max_temp_directory_size": f"{room.f_bavail * room.f_frsize // 10**6} MB",
            "preserve_insertion_order": False,  # each query that reaches a byte has an order
            "autoload_known_extensions": False,
            "autoinstall_known_extensions": False,
            "python_enable_replacements": False,
        }
        with contextlib.closing(duckdb.connect(":memory:", config=settings)) as opened:
            opened.execute("SET disabled_optimizers = 'join_filter_pushdown'")  # it gave wrong results three times
            # In notebooks and with python -c duckdb writes one to standard output, if a query takes two seconds.
            opened.execute("SET enable_progress_bar = false")
            try:
                yield opened
            except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
                why = " ".join(str(error).split())
                raise OSError(f"{scratch}: has no room for a query ({why}). Make room, or set TMPDIR to another disk") from error


def query(documents: Any, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows that a query of a table ``documents`` gives."""
    with connection() as opened:
        opened.register("documents", documents)
        found: list[tuple[Any, ...]] = opened.execute(sql, values).fetchall()
        return found


NAMES = """
CREATE TEMP TABLE names AS
SELECT unnest($names::VARCHAR[]) AS name, generate_subscripts($names::VARCHAR[], 1)::INTEGER - 1 AS place
"""
REPEATED = """
CREATE TEMP TABLE repeated AS
SELECT key FROM a GROUP BY key HAVING count(*) > 1 UNION SELECT key FROM b GROUP BY key HAVING count(*) > 1
"""
CHANGES = """
CREATE TEMP TABLE changes AS
WITH of_a AS (
    SELECT *, row_number() OVER (PARTITION BY key ORDER BY digest, number) AS nth, count(*) OVER (PARTITION BY key) AS often
    FROM a WHERE key IN (SELECT key FROM repeated)
    UNION ALL SELECT *, 1, 1 FROM a WHERE key NOT IN (SELECT key FROM repeated)
), of_b AS (
    SELECT *, row_number() OVER (PARTITION BY key ORDER BY digest, number) AS nth, count(*) OVER (PARTITION BY key) AS often
    FROM b WHERE key IN (SELECT key FROM repeated)
    UNION ALL SELECT *, 1, 1 FROM b WHERE key NOT IN (SELECT key FROM repeated)
), pairs AS (
    SELECT of_a.number AS a, of_b.number AS b, of_a.place AS place_a, of_b.place AS place_b,
        of_a.often = of_b.often AND of_a.digest <> of_b.digest AS changed,
        of_a.often = of_b.often AND of_a.place <> of_b.place AS moved
    FROM of_a FULL JOIN of_b ON of_a.key = of_b.key AND of_a.nth = of_b.nth
)
SELECT a, b, names_a.name AS name_a, names_b.name AS name_b, unnest(CASE
    WHEN a IS NULL THEN ['added'] WHEN b IS NULL THEN ['removed'] WHEN changed AND moved THEN ['changed', 'moved']
    WHEN changed THEN ['changed'] ELSE ['moved'] END) AS kind
FROM pairs LEFT JOIN names AS names_a ON names_a.place = place_a LEFT JOIN names AS names_b ON names_b.place = place_b
WHERE a IS NULL OR b IS NULL OR changed OR moved
"""
"""Changes from documents a to documents b, which have a key, a digest, a number and a place, whose name is in a table. Of several
documents with one key, as many were added or removed as one side has more of them. If both have a key equally often, its
documents are in the order of their digests.
"""
