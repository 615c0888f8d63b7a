"""Work for other processes: items and steps that went through JSON are the ones that were sent."""

import json
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ParameterTypeError

from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS, SCRATCH
from flat_tokens.stores.store import Store
from flows.groups import tokenize_group
from flows.pipelines.stages import DOWNLOAD, SPLIT, TOKENIZE, run_steps
from flows.runners.elsewhere import group_of, work_of
from flows.runners.work_pool import has_room
from tasks.assemble.assembler import Assembler
from tasks.assemble.write import Span
from tasks.config import BuildConfig, Source
from tasks.download.sources import resolve_source
from tasks.groups import Group
from tasks.models import SourceFile
from tasks.output.leases import Workspace
from tasks.output.places import scratch_of
from tasks.output.target import SplitRule, Target
from tasks.shards.recipe import Recipe
from tasks.text.files import stamp
from tasks.tokenize.tokenizers import load_tokenizer
from tests.refusal import refusal
from tests.slices import at_hand, range_of_slice
from tests.sources import write_rows


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    data = write_rows(tmp_path / "data/a.parquet", [{"text": f"document {i}"} for i in range(40)], group=20).parent
    settings = {"output": str(tmp_path / "out"), "source": {"path": str(data)}, "tokenizer": "bytes", "slice_bytes": 100}
    return BuildConfig.model_validate(settings)


def recipe_of(config: BuildConfig, digest: str | None = None) -> Recipe:
    return Recipe(
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=digest or load_tokenizer(config.tokenizer).digest,
        fast=False,
        documents=config.documents,
    )


def sent(group: Group) -> Group:
    return Group.model_validate_json(json.dumps(json.loads(group.model_dump_json())))


def test_the_same_work_has_the_same_digest_in_every_process(tmp_path, config):
    """Each writes to a workspace of its own, and one of them has no assembler. What they do is the same, whole builds show.
    Usual columns of a source are not settings that somebody gave: it has text, or prompts, or messages.
    """
    talks = (Source.model_validate({"path": config.sources[0].path, "messages_column": "talk"}),)
    here, there = (Workspace(Store.at(config.output), str(tmp_path / name)) for name in ("here", "there"))
    (found,) = resolve_source(config.sources[0], 0).files
    slice_ = range_of_slice(SourceFile(source=0, name="a", size=9, sha256="ab", format="jsonl", found=found), 0, 19, 6)
    recipe, target = recipe_of(config), target_of(here)
    for items, ours, theirs in (
        ([(found,)], DOWNLOAD.given(config.sources, 100, here), DOWNLOAD.given(config.sources, 100, there)),
        ([(found,)], DOWNLOAD.given(talks, 100, here), DOWNLOAD.given(talks, 100, there)),
        ([slice_], TOKENIZE.given(recipe, here, ()), TOKENIZE.given(recipe, there, ())),
        ([SPAN], SPLIT.given(target, Assembler(target)), SPLIT.given(target_of(there), None)),
    ):
        group = group_of(config, items, [ours])
        assert group.digest == group_of(config, items, [theirs]).digest
        assert work_of(sent(group), there) == (items, [theirs])


def target_of(workspace: Workspace, name: str = "0123456789abcdef") -> Target:
    return Target(workspace=workspace, name=name, layout="mmap", rule=SplitRule(fraction=0.5, seed=0), columns={"n": "int"})


SPAN = Span(split="train", of_tokens=True, start=0, stop=8)


def test_a_stage_that_is_not_for_other_processes_is_refused(config):
    place = Workspace(Store.at(config.output), "")
    told = group_of(config, [SPAN], [SPLIT.given(target_of(place))])
    for name in ("shard-write", "os.system"):
        with refusal("is not one that other processes work on"):
            work_of(told.model_copy(update={"steps": (told.steps[0].model_copy(update={"stage": name}),)}), place)


def test_another_tokenizer_of_the_same_name_is_refused(config):
    recipe, nowhere = recipe_of(config, "0" * 64), Workspace(Store.at(config.output), "")
    with refusal(r"Give every machine the same file\."), TOKENIZE.pool.around([], recipe, nowhere, ()):
        pass


def grouped(config: BuildConfig, change: str, to: str, place: Workspace) -> Group:
    """A group that cuts a build's file, altered as somebody can who writes to the output: its digest is made anew."""
    (found,) = resolve_source(config.sources[0], 0).files
    told = group_of(config, [(found,)], [DOWNLOAD.given(config.sources, config.slice_bytes, place)]).model_dump_json()
    assert change in told
    return Group.model_validate_json(told.replace(change, to))


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A worker with roots; a secret lies beside them."""
    monkeypatch.setenv(INPUT_ROOTS, str(tmp_path / "data"))
    monkeypatch.setenv(OUTPUT_ROOTS, str(tmp_path / "out"))
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    return Workspace(Store.at(tmp_path / "out"), str(tmp_path / "out/staging"), str(tmp_path / "out/scratch"))


def test_a_group_has_a_worker_read_nothing_outside_its_roots(tmp_path, config, rooted):
    for uri in (f"{tmp_path}/secret.jsonl", f"file://{tmp_path}/secret.jsonl", "http://127.0.0.1:9/a", "hf://datasets/a/b/c"):
        items, steps = work_of(grouped(config, f"{tmp_path}/data/a.parquet", uri, rooted), rooted)
        with refusal("may not be read here"):
            run_steps(items[0], steps)
    with refusal("may not be read here"):
        work_of(grouped(config, f'"{tmp_path}/data"', f'"{tmp_path}"', rooted), rooted)


def test_a_place_that_a_group_tells_of_a_file_is_looked_into_only_within_the_roots(tmp_path, config, rooted):
    (found,) = resolve_source(config.sources[0], 0).files
    secret = tmp_path / "secret.jsonl"
    file = SourceFile(source=0, name="a", size=9, sha256="ab", format="jsonl", location=str(secret), stamp=stamp(str(secret)))
    part = range_of_slice(file._replace(found=found), 0, 19, 6)
    with refusal("changed while the build read it"):  # the source's own file was looked at instead
        at_hand(part, config.sources, rooted)
    link = tmp_path / "out/scratch/files/a.raw"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(secret)
    with refusal("cannot read"):
        at_hand(range_of_slice(file._replace(location=str(link)), 0, 19, 6), config.sources, rooted)


@pytest.mark.parametrize("version", ["../../x", "/tmp/x", "..", "a/b"])
def test_a_version_is_a_name_and_no_path(config, rooted, version):
    group = group_of(config, [SPAN], [SPLIT.given(target_of(rooted, "version-1"))])
    work_of(group, rooted)
    with refusal("String should match pattern"):
        work_of(Group.model_validate_json(group.model_dump_json().replace("version-1", version)), rooted)


def test_scratch_is_the_workers_own_else_one_below_its_roots(tmp_path, config, rooted, monkeypatch):
    group = grouped(config, '"scratch":null', f'"scratch":"{tmp_path}/elsewhere"', rooted)
    with refusal("may not be written here"):
        scratch_of(group, rooted.root)
    shared = group.model_copy(update={"scratch": f"{tmp_path}/out/shared"})
    assert scratch_of(shared, rooted.root) == tmp_path / "out/shared"
    monkeypatch.setenv(SCRATCH, str(tmp_path / "own"))
    assert scratch_of(group, rooted.root) == scratch_of(shared, rooted.root) == tmp_path / "own"


def test_a_group_is_named_by_a_digest():
    with pytest.raises(ParameterTypeError):
        tokenize_group.validate_parameters({"output": "/data/out", "group": "../../elsewhere"})


SCHEDULED, PENDING, RUNNING = StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING


@pytest.mark.parametrize(
    ("states", "is_there"),
    [
        ([SCHEDULED] * 3, True),
        ([SCHEDULED] * 4, False),  # no worker has come yet
        ([PENDING] + [SCHEDULED] * 4, False),
        ([RUNNING] * 9 + [PENDING] + [SCHEDULED] * 9, True),
        ([RUNNING] * 9 + [PENDING] + [SCHEDULED] * 10, False),
        ([RUNNING] * 16, False),
    ],
)
def test_no_more_groups_wait_than_run_but_for_the_first_four(states, is_there):
    assert has_room(states, at_once=16 if len(states) == 16 else 64) is is_there
