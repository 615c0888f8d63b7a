"""The build: text in, a published version out, in five stages; more where documents are compared with each other.

source -> files -> slices -> token shards -> spans of the final arrays -> version. The functions of the stages are in
``tasks``, a folder a stage; ``stages`` says how each is handed out, ``publish`` what every publication has in common.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import plural
from flows.pipelines.publish import OpenOutput, Published, layout_of, opened, publication, timed
from flows.pipelines.stages import FINALIZE, Runner, assembling, shard_parts
from flows.pipelines.text import Made, Text, download, files_of, is_much, pin_sets, pin_sources, unknown
from tasks.config import BuildConfig
from tasks.download.table import known_files
from tasks.finalize.seal import VersionDraft, built_totals, card, is_published, leaving_out
from tasks.gates import Gate
from tasks.output.pointer import read_pointer
from tasks.output.target import Target
from tasks.output.versions import remember_origin
from tasks.progress import meter
from tasks.shards.recipe import settings_of_target
from tasks.tokenize.engines import Tokenizer, forget_what_was_learned, import_ahead, try_fast_engine
from tasks.tokenize.tokenizers import load_tokenizer


class BuildResult(Published):
    """Result of a build. ``slices_reused``: those whose tokens were there. ``equal_texts_apart``: documents outside train whose
    text another split has, too; None where that was not looked for.
    """

    slices: int
    slices_reused: int
    equal_texts_apart: int | None = None

    @property
    def headline(self) -> str:
        reused = "" if self.was_published or self.held else f", {self.slices_reused:,} of {plural(self.slices, 'slice')} reused"
        return super().headline + reused


def build(config: BuildConfig, runner: Runner, publish_anyway: str | None = None) -> BuildResult:
    """Publish the version that the sources give now, if its gates let it through. A version that is there already is left as it
    is. *publish_anyway*: why a person publishes it whatever they say.
    """
    with ThreadPoolExecutor(1) as beside, opened(config, publish_anyway) as output:
        given = looked_up_text(config, runner, output, beside, reads_much=True)
        assert given is not None
        config, text, tokenizer = given
        return build_version(text.makes(config, tokenizer, output), text, tokenizer, runner, output)


def looked_up_text(
    config: BuildConfig, runner: Runner, output: OpenOutput, beside: ThreadPoolExecutor, *, reads_much: bool
) -> tuple[BuildConfig, Text, Tokenizer] | None:
    """The configuration with its sets as they are now, the text and the tokenizer, which a thread loads. None where there is much
    to read, or no version yet, unless the caller *reads_much*.
    """
    is_first = output.pointer.version is None
    with timed("download", output.seconds):
        loading = beside.submit(tokenizer_of, config, is_first=is_first)
        config = pin_sets(config, output.root)
        config, pinned = pin_sources(config, output.root)
        found = files_of(pinned)
        if is_much(found):
            after_trial(loading, output.seconds)  # a wrong tokenizer is an error before so much is fetched
        known = known_files(found, config.sources, config.slice_bytes, [output.root])
        if is_first or is_much(unknown(found, known)):
            if not reads_much:
                return None
            beside.submit(import_ahead, loading)
        text = Text.of(config, pinned, download(config, found, runner, output.root, known=known))
        return config, text, after_trial(loading, output.seconds)


def result_if_up_to_date(config: BuildConfig, runner: Runner) -> BuildResult | None:
    """The result of a build that has nothing to do, because the version is published; None where it has, or where that cannot be
    told from the names of files and at most LOOKED_INTO bytes of them.
    """
    root = Store.at(config.output)
    if root.is_local and read_pointer(root).version is None:  # before a directory is made for it
        return None
    with ThreadPoolExecutor(1) as beside, opened(config) as output:
        given = looked_up_text(config, runner, output, beside, reads_much=False)
        if given is None:
            return None
        config, text, tokenizer = given
        made = text.makes(config, tokenizer, output)
        version = made.named.version
        if not is_published(output.root, version, layout_of(config, output.root)):
            return None
        now = output.pointer
        is_held = version in (*now.names("rejected"), now.candidate and now.candidate.version)
        if version != now.version and (config.publish.gates or is_held):
            return None
        return build_version(made, text, tokenizer, runner, output)


def build_version(
    made: Made,
    text: Text,
    tokenizer: Tokenizer,
    runner: Runner,
    output: OpenOutput,
    gates: tuple[Gate, ...] | None = None,
) -> BuildResult:
    """The other stages: slices -> the version that they give, published. *gates*: those of the configuration without it."""
    config, made_of, chats, named = made
    layout = layout_of(config, output.root)
    asked = output.request if isinstance(output.request, BuildConfig) else config  # with its sets as people named them
    made_of = leaving_out(output.forgotten, made_of)
    remember = partial(remember_origin, output.root, config=asked, pinned=text.pinned, files=text.files)
    reuse: dict[str, int] = dict.fromkeys(("slices", "slices_reused", "text_bytes_tokenized"), 0)
    to_judge = config.publish.gates if gates is None else gates

    with publication(output, made_of, layout, remember, to_judge, keeps_waiting=gates is None, named=named) as version:
        if target := version.target(**settings_of_target(config)):
            from flows.pipelines.slices import tokenize  # what has nothing to do does without half of the modules

            with assembling(runner, target, text.file_names) as (assembler, under_way):
                with timed("tokenize", output.seconds):
                    stored = tokenize(config, text, tokenizer, chats, target, runner, output, assembler, under_way)
                    counted = assembler.end()
                with timed("split", output.seconds):
                    meter.begin("split", TOKEN_BYTES * sum(part.counts.token_count for part in shard_parts(counted)))
                    assembled = assembler.finish()
            with timed("finalize", output.seconds):
                documents = partial(built_totals, made_of, shard_parts(counted))
                draft = VersionDraft(made_of, assembled, documents, card, token_bytes=tokenizer.token_bytes)
                reuse.update(finalized(config, target, draft, runner))
            reuse.update(stored.reuse(text.slices, shard_parts(counted)))
    return version.finish(BuildResult, **reuse)


def finalized(config: BuildConfig, target: Target, draft: VersionDraft, runner: Runner) -> dict[str, int]:
    """Finalize the version. Return how many documents another split has, too, if that is to be known and its output is local: a
    store would be read once more. What an engine has learned is forgotten by a thread, which takes a while, and Python's lock.
    """
    counts, forgetting = config.may_part_equal_texts and target.store.is_local, threading.Thread(target=forget_what_was_learned)
    if not counts:
        forgetting.start()
    runner.start(target, FINALIZE.given(draft, config.verify_level)).result()
    if not counts:
        return {}
    from tasks.finalize.equal_texts import equal_texts_apart  # see above

    found = equal_texts_apart(target.store, target.splits)
    forgetting.start()
    return {"equal_texts_apart": found}


def tokenizer_of(config: BuildConfig, *, is_first: bool) -> Tokenizer:
    """The tokenizer of a build. The first one at an output says before its text is here where it will be a slow one."""
    tokenizer = load_tokenizer(config.tokenizer)
    if is_first:
        try_fast_engine(tokenizer, config.tokenizer.engine, config.processors)
    return tokenizer


def after_trial(loading: Future[Tokenizer], seconds: dict[str, float]) -> Tokenizer:
    """The tokenizer, whose trial is a stage of its own within the download of a build."""
    seconds.setdefault("download", 0.0)  # the stage around this one comes first
    before = seconds.get("trial", 0.0)
    with timed("trial", seconds):
        tokenizer = loading.result()
    seconds["download"] -= seconds["trial"] - before
    return tokenizer
