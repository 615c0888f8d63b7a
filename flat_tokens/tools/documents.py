"""``flat-tokens documents``: the documents that a dataset was made of, where each is, and why others are in no split."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from flat_tokens.annotations import JsonObject
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.reader import left_out_at
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.rows.where import pa, parse
from flat_tokens.stores.local import kind_of
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import open_corpus

SUMMARY = "list the documents that a dataset was made of: where each is, and why others are in no split"
EXAMPLES = """\
examples:
  flat-tokens documents out/web                                   a line for each document
  flat-tokens documents out/web --where "reason = 'duplicate'" --columns key,file,row,of
  flat-tokens documents out/web --where "of is not null" --json   duplicates and near-duplicates that were left out
  flat-tokens documents out/web --to documents.parquet            the table, for duckdb, polars, pandas
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a dataset, or a build's output")
    parser.add_argument("--where", metavar="EXPRESSION", help="the documents for which it is true, such as split = 'validation'")
    parser.add_argument("--columns", metavar="NAMES", help="these columns, with commas between them (default: all)")
    parser.add_argument("--to", metavar="FILE", help="write a Parquet file instead, which must not be there")


def run(options: argparse.Namespace) -> int:
    table, where = table_of(options.path), None if options.where is None else parse(options.where)
    names = None if options.columns is None else [name.strip() for name in options.columns.split(",")]
    shown, batches, count = names or table.schema.names, table.batches(names, where), 0
    with contextlib.ExitStack() as stack:
        writer = None
        if options.to is not None:
            if kind_of(options.to) is not None:
                raise FileExistsError(f"{options.to}: exists already. Remove it, or name another file")
            schema = pa.schema([table.schema.field(name) for name in shown])
            writer = stack.enter_context(pa.parquet.ParquetWriter(options.to, schema))
        elif not options.json:
            print("\t".join(shown))
        for batch in batches:
            count += len(batch)
            if writer is not None:
                writer.write_batch(batch)
            for row in batch.to_pylist() if writer is None else ():
                print(_line(row, options.json))
    if options.to is not None:
        print(f"{options.to}: {terminal.plural(count, 'document')}")
    if table.unknown:
        arguments.warn(table.unknown)
    return arguments.SAME if count else arguments.DIFFERENT


def table_of(path: str) -> DocumentTable:
    """The table of the dataset at a path. ValueError for anything else."""
    corpus = open_corpus(path)
    if corpus.format != FLAT_TOKENS or not corpus.manifest or "shard" in corpus.splits:
        raise ValueError(
            f"{corpus.url}: is a {corpus.kind}, which has no record of documents. Name a dataset or a build's output."
        )
    splits: Any = {**corpus.splits, **left_out_at(corpus.store)}
    return DocumentTable(corpus.store, splits)


def _line(row: JsonObject, as_json: bool) -> str:
    if as_json:
        return json.dumps(row, ensure_ascii=False).translate(terminal.JSON_ESCAPES)
    return "\t".join("" if value is None else terminal.line(str(value)) for value in row.values())
