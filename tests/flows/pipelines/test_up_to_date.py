"""A build that has nothing to do is known as such before Prefect is imported, if that is soon told."""

from pathlib import Path

import pytest

from flows.pipelines.build import BuildResult, result_if_up_to_date
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tests.faults.support import build_here, settings_of, write_notes


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    return BuildConfig.model_validate(settings_of(tmp_path / "out", write_notes(tmp_path / "in/notes.jsonl", 6)))


def look(config: BuildConfig) -> BuildResult | None:
    with Threads(1) as runner:
        return result_if_up_to_date(config, runner)


def test_its_result_is_that_of_the_build(config):
    build_here(config)
    found, again = look(config), build_here(config)
    assert found.was_published
    assert found.model_copy(update={"seconds": {}}) == again.model_copy(update={"seconds": {}})


def test_where_there_is_something_to_do_nothing_is_done(config, tmp_path):
    """Nothing is published yet; the text has grown; another split is wanted."""
    assert look(config) is None
    assert not (tmp_path / "out").exists()
    first = build_here(config)
    assert look(config.model_copy(update={"split_seed": 1})) is None
    write_notes(tmp_path / "in/notes.jsonl", 7)
    assert look(config) is None
    assert [path.name for path in (tmp_path / "out/versions").iterdir()] == [first.version]
    assert len(list((tmp_path / "out/runs").glob("*.json"))) == 1


def test_files_that_take_long_to_read_are_left_to_the_build(config, monkeypatch):
    """People watch how far that is."""
    build_here(config)
    monkeypatch.setattr("flows.pipelines.text.LOOKED_INTO", 10)
    assert look(config) is None
