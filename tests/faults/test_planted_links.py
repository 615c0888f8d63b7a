"""Links in an output: whatever stands behind one belongs to somebody else, and nothing there is removed or written."""

import contextlib
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tasks.groups import put_group, reporting
from tasks.output import paths
from tasks.output.leases import attempt
from tasks.output.pointer import read_pointer
from tasks.shards.index import read_index
from tests.examples import first_fast
from tests.faults.power_loss import tree_of
from tests.faults.support import Settings, build_here
from tests.refusal import refusal
from tests.tasks.test_groups import group

NOW = Policy(keep_versions=1, grace_days=0)
HELD = [name for name, kind in paths.KINDS.items() if kind == "directory"]
ENTRIES = [
    "_staging/0123", "_staging/0123/4567", "_staging/collected", "_cache/" + "f" * 64, "_cache/files/0123.raw",
    "_quarantine/x", "_groups/x", "versions/x", "origins/x.json", "runs/x-y.json",
]  # fmt: skip


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What somebody else keeps: files at every depth, and directories such as an output has."""
    here = tmp_path / "elsewhere"
    for name in ("a", "b/c", "files/d", "0123/4567/e", "f" * 64 + "/g", "collected/h", "i.json", "latest/j"):
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
        os.utime(path, (0, 0))
    (here / "empty/collected").mkdir(parents=True)
    return here


@pytest.mark.parametrize("kind", first_fast(["directory", "file"]))
@pytest.mark.parametrize("name", [*HELD, *ENTRIES])
def test_a_link_is_followed_neither_by_a_build_nor_by_a_collection(settings, name, kind, tmp_path, elsewhere):
    """In place of a directory of the output, it is refused before they do anything. As an entry, it leads nobody anywhere."""
    output, root = tmp_path / "out", Store.at(tmp_path / "out")
    build_here(settings)
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).symlink_to(elsewhere if kind == "directory" else elsewhere / "a")
    before = tree_of(elsewhere)
    told = f"{name}: is a link instead of a directory. Move it away and run again"
    for act in (partial(build_here, {**settings, "split_seed": 1}), partial(collect, root, NOW, delete=True)):
        with refusal(told) if name in HELD else contextlib.suppress(OSError, ValueError):
            act()
    if name in HELD:
        with refusal("through which nothing is removed", NotADirectoryError):
            root.remove(f"{name}/b")
    else:
        build_here(settings)
    assert tree_of(elsewhere) == before


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("latest", "file", "latest: is a file instead of a link"),
        ("runs", "file", "runs: is a file instead of a directory"),
        ("latest.json", "directory", "latest.json: is a directory instead of a file"),
    ],
)
def test_something_else_in_a_place_of_the_output_is_refused_before_work(name, kind, told, settings, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / name).mkdir() if kind == "directory" else (output / name).touch()
    with refusal(f"{output}/{told}. Move it away and run again"):
        build_here(settings)
    assert os.listdir(output) == [name]


def test_a_version_that_is_a_link_goes_without_what_it_leads_to(settings, tmp_path):
    """Somebody moved it to another disk."""
    output = tmp_path / "out"
    first = build_here(settings).version
    (output / "versions" / first).rename(tmp_path / "moved")
    (output / "versions" / first).symlink_to(tmp_path / "moved")
    before = tree_of(tmp_path / "moved")
    last = build_here({**settings, "split_seed": 1}).version
    assert [item.kind for item in collect(Store.at(output), NOW, delete=True).garbage][:1] == ["version"]
    assert tree_of(tmp_path / "moved") == before
    assert os.listdir(output / "versions") == [last]
    assert read_pointer(Store.at(output)).version == last


def test_staging_that_becomes_a_link_while_an_attempt_runs(tmp_path, elsewhere):
    root = Store.at(tmp_path)
    with attempt(root, tmp_path / "_cache", "0123") as place:
        name = Path(place.staging).name
        shutil.copytree(elsewhere / "b", elsewhere / "0123" / name)
        (tmp_path / "_staging").rename(tmp_path / "away")
        (tmp_path / "_staging").symlink_to(elsewhere)
    assert [*tree_of(elsewhere / "0123" / name)] == ["c"]


def planted(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """The names that a build with these settings gives to its version and its shard."""
    build_here({**settings, "output": str(tmp_path / "whole")})
    (version,) = os.listdir(tmp_path / "whole/versions")
    shard, *_ = read_index(Store.at(tmp_path / "whole"), version).published
    return {"VERSION": version, "SHARD": shard.key}


@pytest.mark.parametrize(
    "name",
    [
        "_staging/VERSION",
        "_cache/SHARD",
        "_cache/SHARD/document_key",
        "versions/VERSION",
        "versions/VERSION/train",
        "versions/VERSION/train/encoded_tokens",
        "versions/VERSION/train/encoded_tokens/c",
        "versions/VERSION/validation",
        "versions/VERSION/documents",
        "versions/VERSION/documents/train/key",
    ],
)
def test_a_build_writes_through_no_link_below_its_output(name, settings, tmp_path, elsewhere):
    """Its names can be foreseen. A link in the way of the build is told with the next step."""
    output = tmp_path / "out"
    is_told = name in ("versions/VERSION", "versions/VERSION/train/encoded_tokens")
    for word, real in planted(settings, tmp_path).items():
        name = name.replace(word, real)
    (output / name).parent.mkdir(parents=True)
    (output / name).symlink_to(elsewhere)
    before = tree_of(elsewhere)
    told = f"Is a link instead of a directory. Move it away and run again: '{output}/{name}'"
    with pytest.raises(NotADirectoryError, match=told) if is_told else contextlib.suppress(NotADirectoryError):
        build_here(settings)
    assert tree_of(elsewhere) == before


def test_groups_and_reports_are_written_through_no_link(tmp_path, elsewhere):
    (tmp_path / "out/_groups").mkdir(parents=True)
    mine = group(tmp_path)
    (tmp_path / "out/_groups" / mine.digest).symlink_to(elsewhere)
    before, root = tree_of(elsewhere), Store.at(tmp_path / "out")
    with refusal("Is a link instead of a directory", NotADirectoryError):
        put_group(root, mine)
    with refusal("Is a link instead of a directory", NotADirectoryError), reporting(root, mine, "run"):
        pass
    assert tree_of(elsewhere) == before
