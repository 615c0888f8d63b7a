"""A build that needs more room than the disk of its output has says so, with both figures, before it has filled the disk."""

from __future__ import annotations

import logging
import shutil
from typing import NamedTuple

import pytest

from flat_tokens.stores.store import Store
from flows.commands.build import plan_text
from flows.pipelines.build import build
from flows.pipelines.plan import plan
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.shards.sample import lack_of_room


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(("free", "is_told"), [(300_000, True), (3_000_000, False)])
def test_plan_and_build_warn_when_the_disk_is_too_small(tmp_path, monkeypatch, caplog, free, is_told):
    (tmp_path / "a.txt").write_text("a text. " * 25_000)  # one document, longer than samples are
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free))
    settings = {"output": str(tmp_path / "out"), "source": {"path": str(tmp_path / "a.txt")}, "tokenizer": "bytes", "name": "a"}
    config = BuildConfig.model_validate(settings)
    words = f"{tmp_path}/out: the build needs about "
    made = plan(config)
    assert (made.warning is not None) == is_told
    assert any(line.startswith("  warning ") for line in plan_text(made)) == is_told
    assert "  scratch    nothing: no file is fetched or unpacked" in plan_text(made)
    with caplog.at_level(logging.WARNING), Threads(1) as runner:
        build(config, runner)
    told = [line for line in caplog.messages if "the build needs" in line]
    assert told == ([made.warning] if is_told else [])
    assert all(line.startswith(words) for line in told)
    assert plan(config).warning is None  # there is nothing to build any more


def test_room_that_nobody_knows_is_no_lack_of_room():
    assert lack_of_room(Store.at("memory://out"), 10**18, None) is None
