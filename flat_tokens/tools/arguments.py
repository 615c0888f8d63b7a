"""Arguments and output that the commands of ``flat-tokens`` share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from flat_tokens.formats import FLAT_TOKENS, FORMATS
from flat_tokens.tools.corpus import Corpus, open_corpus, vocabulary_of
from flat_tokens.tools.flags import whole
from flat_tokens.vocabulary import Vocabulary

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit statuses, as of grep and diff: found or the same; not found or different; an error."""


def add_path(parser: argparse.ArgumentParser, name: str = "path") -> None:
    parser.add_argument(
        name,
        metavar=name.upper(),
        help="a dataset, a build's output, one split, a token shard, or files of another format; a local path or a URL",
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=[FLAT_TOKENS, *FORMATS],
        metavar="NAME",
        help=f"the format, where the content does not tell: {', '.join([FLAT_TOKENS, *FORMATS])}",
    )

    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="KEY=VALUE",
        help="an option of the format, such as end_of_text=50256 to find the documents again in streams of tokens",
    )


def option(text: str) -> tuple[str, Any]:
    """A format's option: its value is JSON where it is JSON, else text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="NAME_OR_FILE",
        help="decode with this one instead of the one in the manifest: a tiktoken encoding, bytes, a .tiktoken file, a "
        "tokenizer.json or its directory, or a repository of the hub",
    )
    parser.add_argument(
        "--pattern",
        metavar="REGEX_OR_NAME",
        help="with a .tiktoken file, to encode too: the pattern that splits text, or the tiktoken encoding whose it is",
    )


def add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="PATH",
        help="a directory or URL below which source files are looked for, or such a file; may be given several times. Without "
        "it, where the build found them",
    )


def add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours; auto: on a terminal, unless NO_COLOR is set",
    )


def at_least(least: int) -> Any:
    """The argument type of whole numbers from *least* up."""

    def parse(text: str) -> int:
        if (value := whole(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return parse


def corpus_of(options: argparse.Namespace, path: str | None = None) -> Corpus:
    return open_corpus(options.path if path is None else path, options.format, dict(options.option))


def vocabulary_for(corpus: Corpus, options: argparse.Namespace) -> Vocabulary | None:
    return vocabulary_of(corpus, options.tokenizer, options.pattern, warn)


def warn(message: str) -> None:
    print(f"flat-tokens: {message}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
