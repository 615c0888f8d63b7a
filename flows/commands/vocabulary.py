"""The commands about tokenizers: one fetches a published one for machines without a network, the other trains one."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flat_tokens.record.ledger import Ledger
from flat_tokens.stores.local import kind_of
from flat_tokens.tools.cli import existing_place, whole
from flat_tokens.tools.terminal import line, plural, show, size
from flows.commands.build import checked_config, seconds_line
from flows.commands.running import add_command, add_fields, checked_request, given_fields, run_with_progress

VOCABULARY = """
NAME  an encoding of tiktoken, such as cl100k_base, or a hub repository
--to FILE!  such as cl100k_base.tiktoken, tokenizer.json or tokenizer.model
--revision REVISION  of the hub repository"""
TRAIN = """
dataset=CONFIG_OR_DATASET?  a configuration file, whose sources are read, or a dataset, whose training documents are decoded
--set KEY=VALUE...  on top of the configuration file
--run=ledger RUN.json  instead: the documents that the run of this ledger has seen
--step N  with --run: before step N
--from=trained DIRECTORY  instead: cut from this one, which was trained here
--vocab-size N[,N...]!  ids of the vocabulary, special tokens among them; several for one of each size
--to DIRECTORY  a directory for each; {name} and {size} are replaced (default: tokenizers/{name}-{size})
--tokenizer NAME_OR_FILE  decode a dataset's tokens with this tokenizer instead of the one in its manifest
--trust-records  read what a dataset's or ledger's own record names: tokenizers, datasets
--at"""


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser, each with its function as ``run``."""
    from tasks.vocabularies.request import VocabularyRequest

    about = "write the file of a published tokenizer, for machines without a network"
    add_command(commands, "vocabulary", run_vocabulary, about, VOCABULARY, to=Path)
    about, places = (
        "train a tokenizer on text, and cut smaller ones from it",
        dict.fromkeys(("dataset", "ledger", "trained"), existing_place),
    )
    train = add_command(commands, "train-tokenizer", run_train, about, TRAIN, reports=True, set=str, step=int, **places)
    add_fields(train, VocabularyRequest, special_tokens="special-token")


def run_vocabulary(options: Namespace) -> None:
    """Run the command."""
    from flat_tokens.stores.store import Store
    from flat_tokens.vocabulary import definition_file
    from tasks.locations import plain_location, writable

    writable(plain_location(str(options.to)))
    endings = (".json", ".model") if "/" in options.name else (".tiktoken",)
    wrong = "--to {}: the name of this file has to end with {}, by which builds know what it is"
    if options.to.suffix not in endings:
        raise ValueError(wrong.format(options.to, " or ".join(endings)))
    data, setting, ending = definition_file(options.name, options.revision)
    if options.to.suffix != ending:
        raise ValueError(wrong.format(options.to, ending))
    path = options.to.absolute()
    Store.at(str(path.parent)).put(path.name, data)
    wanted = setting.format(path)
    show(
        options,
        {"path": str(path), "bytes": len(data), "tokenizer": wanted},
        [f"wrote {path}, {size(len(data))}", f"tokenizer: {wanted}"],
    )


def run_train(options: Namespace) -> None:
    """Run the command."""
    from tasks.vocabularies.request import VocabularyRequest

    if sum(one is not None for one in (options.dataset, options.ledger, options.trained)) != 1:
        raise ValueError("train-tokenizer takes one of CONFIG_OR_DATASET, --run and --from")
    if (options.ledger is None) != (options.step is None):
        raise ValueError("--run and --step belong together: the documents that a run has seen before that step")
    if options.set and (options.dataset is None or kind_of(options.dataset) != "file"):
        raise ValueError("--set changes a configuration file, but none is given")
    settings = settings_of(options)
    request = checked_request(VocabularyRequest, settings) if options.trained is None else None
    config = checked_config(options.dataset, options.set) if options.dataset and kind_of(options.dataset) == "file" else None
    from flows.pipelines.train_tokenizer import (
        TO,
        VocabularyResult,
        cut_trained,
        train_on_run,
        train_on_sources,
        train_on_version,
    )
    from flows.runners.chosen import runner_without_server

    to = TO if options.to is None else options.to

    def warn(message: str) -> None:
        print(line(f"{options.command}: {message}"), file=sys.stderr)

    decoding = (options.tokenizer, options.trust_records, warn)
    flow = "flows.train_tokenizer:train_tokenizer"
    if request is None:
        if given := [name for name in ("pattern", "special_tokens", "fraction", "seed") if name in settings]:
            raise ValueError(f"--from reads no text: {given[0]} is that of the vocabulary that is cut")
        result = cut_trained(options.trained, settings["vocab_sizes"], to)
    elif config is not None:
        here = runner_without_server(config)
        result = run_with_progress(
            options, here, lambda runner: train_on_sources(config, request, to, runner), flow, config, request, to
        )
    elif options.ledger is not None:
        options.no_server = True  # a ledger is of the machine that trains

        def train(_: None) -> VocabularyResult:
            ledger = Ledger.open(options.ledger, places=dict(options.at), trust_records=options.trust_records)
            return train_on_run(ledger, options.step, request, to, *decoding)

        result = run_with_progress(options, nullcontext(), train, flow, options.ledger)
    else:
        dataset = options.dataset
        result = run_with_progress(
            options,
            nullcontext(),
            lambda _: train_on_version(dataset, request, to, *decoding),
            flow,
            dataset,
            request,
            to,
            options.tokenizer,
            options.trust_records,
        )
    lines = [
        result.headline,
        *(f"  {one.path}  {plural(one.vocab_size, 'id')}, {plural(one.merges, 'merge')}" for one in result.vocabularies),
        *([seconds_line(result.seconds)] if result.seconds else []),
    ]
    show(options, result.model_dump(mode="json"), lines)


def settings_of(options: Namespace) -> dict[str, Any]:
    """The settings of a request that are given."""
    from tasks.vocabularies.request import VocabularyRequest

    try:
        sizes = tuple(whole(size) for size in options.vocab_size.split(","))
    except ArgumentTypeError as error:
        raise ValueError(f"--vocab-size {options.vocab_size}: {error}. Write 32768, or 32768,65536") from error
    settings = {**given_fields(options, VocabularyRequest), "vocab_sizes": sizes}
    if options.special_tokens is not None:
        settings["special_tokens"] = tuple(filter(None, options.special_tokens))
    return settings
