"""The build: text in, a published version out, in five stages; more if documents are compared with each other.

source -> files -> slices -> token shards -> spans of the final arrays -> version. The functions of the stages are in
``tasks``, a folder a stage; ``stages`` says how each is handed out, ``publish`` what every publication has in common.
"""

from __future__ import annotations

import threading
from functools import partial

from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import plural
from flows.pipelines.publish import OpenOutput, PublishResult, opened, publication, timed
from flows.pipelines.stages import FINALIZE, Runner, assembling, shard_parts
from flows.pipelines.text import Made, Text, look_up
from tasks.config import BuildConfig
from tasks.finalize.card import card
from tasks.finalize.provenance import note_files, without_forgotten
from tasks.finalize.seal import VersionDraft, built_totals
from tasks.gates import Gate
from tasks.output.places import layout_of
from tasks.output.pointer import is_dataset, read_pointer
from tasks.output.target import Target
from tasks.output.versions import remember_origin
from tasks.progress import meter
from tasks.shards.recipe import settings_of_target
from tasks.tokenize.engines import forget_what_was_learned


class BuildResult(PublishResult):
    """Result of a build. ``slices_reused``: those whose tokens were there. ``equal_texts_apart``: documents outside train whose
    text another split has, too; None if that was not looked for.
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
    with opened(config, publish_anyway) as output:
        made = look_up(config, runner, output)
        assert made is not None
        return build_version(made, runner, output)


def result_if_up_to_date(config: BuildConfig, runner: Runner) -> BuildResult | None:
    """The result of a build that has nothing to do, because its version is published. None if there is something to do, or if
    the names of files and at most LOOKED_INTO bytes of them do not decide it.
    """
    root = Store.at(config.output)
    if root.is_local and read_pointer(root).version is None:  # before a directory is made for it
        return None
    with opened(config) as output:
        made = look_up(config, runner, output, reads_much=False)
        if made is None:
            return None
        now, version = output.pointer, made.named.version
        if not is_dataset(output.root, version):
            return None
        is_held = version in (*now.names("rejected"), now.candidate and now.candidate.version)
        if version != now.version and (made.config.publish.gates or is_held):
            return None
        return build_version(made, runner, output)


def build_version(made: Made, runner: Runner, output: OpenOutput, gates: tuple[Gate, ...] | None = None) -> BuildResult:
    """The other stages: slices -> the version that they give, published. *gates*: those of the configuration without it."""
    config, text, tokenizer, _, made_of, named = made
    if len(text.cuts) < len(text.files) and not is_dataset(output.root, named.version):
        with timed("download", output.seconds):  # all files are read, and cut
            made = Text.read(config, text.pinned, runner, output.root).makes(config, tokenizer, output)
        config, text, tokenizer, _, made_of, named = made
    asked = output.request if isinstance(output.request, BuildConfig) else config  # with its sets as people named them
    made_of = without_forgotten(output.forgotten, made_of)
    remember = partial(remember_origin, output.root, config=asked, pinned=text.pinned, files=text.files)
    reuse: dict[str, int] = dict.fromkeys(("slices", "slices_reused", "text_bytes_tokenized"), 0)
    layout, to_judge = layout_of(config, output.root), config.publish.gates if gates is None else gates

    with publication(output, made_of, layout, remember, to_judge, keeps_waiting=gates is None, named=named) as version:
        if target := version.target(**settings_of_target(config)):
            from flows.pipelines.slices import tokenize  # what has nothing to do does without half of the modules

            with assembling(runner, target, text.file_names) as (assembler, under_way):
                with timed("tokenize", output.seconds):
                    stored = tokenize(made, target, runner, output, assembler, under_way)
                    counted = assembler.end()
                note_files(output.root, output.forgotten, text.slices, shard_parts(counted))
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
