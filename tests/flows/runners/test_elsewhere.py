"""Work for other processes: items and steps that went through JSON are the ones that were sent."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flat_tokens.stores.store import StoredObject
from flows.pipelines.stages import DOWNLOAD, SHARD_WRITE, SPLIT, TOKENIZE, through
from flows.runners.elsewhere import group_of, result_as_json, result_from_json, work_of
from tasks.config import BuildConfig
from tasks.download.sources import resolve_source
from tasks.groups import Group
from tasks.output.staging import Place, attempt
from tasks.shards.receipts import load_shard
from tasks.shards.recipe import Recipe
from tasks.split.spans import Span, SplitRule
from tasks.split.write import Written
from tasks.tokenize.tokenizers import load_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(40)]}), data / "a.parquet", row_group_size=20)
    settings = {"output": str(tmp_path / "out"), "source": {"path": str(data)}, "tokenizer": "bytes", "slice_bytes": 100}
    return BuildConfig.model_validate(settings)


def recipe_of(config: BuildConfig, place: Place, digest: str | None = None) -> Recipe:
    return Recipe(
        place=place,
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=digest or load_tokenizer(config.tokenizer).digest,
        fast=False,
        documents=config.documents,
    )


def sent(group: Group) -> Group:
    return Group.model_validate_json(json.dumps(json.loads(group.model_dump_json())))


def test_a_slice_that_another_process_tokenizes_becomes_the_shard_of_its_key(tmp_path: Path, config: BuildConfig) -> None:
    """Files are cut by one process, slices tokenized by a second one; each writes to a place of its own."""
    (found,) = resolve_source(config.sources[0], 0).files
    with attempt(config.output, tmp_path / "scratch", "parent") as here, attempt(config.output, tmp_path, "worker") as there:
        cutting = group_of(config, [found], [DOWNLOAD.given(config.sources, config.slice_bytes, here)])
        items, steps = work_of(sent(cutting), there)
        assert items == [found]
        told = json.loads(json.dumps(result_as_json(steps, through(items[0], steps))))
        cut = result_from_json(steps, told)
        assert cut.slices[0].file.found == found

        recipe = recipe_of(config, here)
        group = group_of(config, cut.slices, [TOKENIZE.given(recipe), SHARD_WRITE.given(here)])
        assert group.digest == group_of(config, cut.slices, [TOKENIZE.given(recipe), SHARD_WRITE.given(there)]).digest
        items, steps = work_of(sent(group), there)
        assert items == cut.slices
        assert steps == [TOKENIZE.given(recipe.model_copy(update={"place": there})), SHARD_WRITE.given(there)]
        shard = result_from_json(steps, result_as_json(steps, through(items[0], steps)))
        assert shard == load_shard(here.root, recipe.key(cut.slices[0]))


def test_spans_and_what_was_written_of_them_come_back(config: BuildConfig, tmp_path: Path) -> None:
    place = Place(output=config.output, staging=str(tmp_path / "staging"))
    span = Span(split="train", of_tokens=True, start=0, stop=8, places=())
    step = SPLIT.given(SplitRule(fraction=0.5, seed=0), "mmap", place, "0123456789abcdef")
    items, steps = work_of(sent(group_of(config, [span], [step])), place)
    assert (items, steps) == ([span], [step])
    written = Written((StoredObject("train/encoded_tokens/c/0", 12, "ab"),), 7)
    assert result_from_json(steps, json.loads(json.dumps(result_as_json(steps, written)))) == written


def test_a_stage_that_is_not_for_other_processes_is_refused(config: BuildConfig, tmp_path: Path) -> None:
    place = Place(output=config.output, staging="")
    span = Span(split="train", of_tokens=True, start=0, stop=8, places=())
    step = SPLIT.given(SplitRule(fraction=0.5, seed=0), "mmap", place, "0123456789abcdef")
    told = group_of(config, [span], [step])
    for name in ("shard-write", "os.system"):
        with pytest.raises(ValueError, match="is not one that other processes work on"):
            work_of(told.model_copy(update={"steps": (told.steps[0].model_copy(update={"stage": name}),)}), place)


def test_another_tokenizer_of_the_same_name_is_refused(config: BuildConfig, tmp_path: Path) -> None:
    recipe = recipe_of(config, Place(output=config.output, staging=""), "0" * 64)
    assert TOKENIZE.pool is not None
    with pytest.raises(ValueError, match=r"Give every machine the same file\."), TOKENIZE.pool.around([], recipe):
        pass
