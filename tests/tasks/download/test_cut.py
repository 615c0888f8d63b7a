"""Files that are cut and brought here: each once, and none that is another one than it was."""

import hashlib
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tasks.download.cut
import tasks.download.outlines
import tasks.download.small
from flat_tokens.stores.store import Store
from tasks.config import HubDataset, Source
from tasks.download.cut import cut_files, fetched_ahead, look_into
from tasks.download.hub import resolve_hub
from tasks.download.slices import slices_of
from tasks.download.table import CutFile, known_files, remember_files
from tasks.models import FoundFile, Slice
from tasks.output.leases import Workspace
from tests.calls import before_each_call
from tests.refusal import refusal
from tests.slices import at_hand
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401  a fixture

SLICE_BYTES = 250


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    return Workspace(Store.at(tmp_path / "out"), staging="", scratch=str(tmp_path / "scratch"))


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files go another way, which has tests of its own."""
    monkeypatch.setattr(tasks.download.small, "SMALL_BYTES", 0)


def cut_file(found: FoundFile, sources: tuple[Source, ...], place: Workspace) -> CutFile:
    """Cut a file, and let the output know it."""
    (cut,) = cut_files((found,), sources, SLICE_BYTES, place)
    remember_files(place.root, sources, SLICE_BYTES, [cut], time.time_ns())
    return cut


def recorded(found: Sequence[FoundFile], sources: tuple[Source, ...], place: Workspace) -> dict[FoundFile, CutFile]:
    """The files that are known."""
    known = known_files(found, sources, SLICE_BYTES, [place.root])
    return {file: cut for file, cut in zip(found, known, strict=True) if cut is not None}


def sliced(cut: CutFile) -> list[Slice]:
    return list(slices_of([cut], SLICE_BYTES))


def copy_of(cut: CutFile, sources: tuple[Source, ...], place: Workspace) -> Path:
    """The file on this machine, from which the first slice is read."""
    return Path(at_hand(sliced(cut)[0], sources, place).ranges[0].file.location)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are fetched, in order."""
    return before_each_call(monkeypatch, "tasks.download.cut.fetch_file", lambda found, *_: found.name)


def write_file(tmp_path: Path, text: str = "document") -> tuple[FoundFile, tuple[Source, ...]]:
    """A file that its store names by its content, as a store elsewhere would."""
    path = tmp_path / "data/a.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": [f"{text} {i}" for i in range(40)], "id": list(range(40))}), path, row_group_size=10)
    found = FoundFile(source=0, name=path.name, uri=str(path), size=path.stat().st_size, immutable=f"ETag:{text}")
    return found, (Source(path=str(path.parent)),)


def test_a_file_that_is_another_one_than_its_record_says_is_refused_and_the_next_build_looks_again(tmp_path, place):
    found, sources = write_file(tmp_path)
    cut_file(found, sources, place)
    (known,) = recorded([found], sources, place).values()
    write_file(tmp_path, "another")  # and its store does not tell
    with refusal(re.escape("a.parquet changed while the build read it")):
        copy_of(known, sources, place)
    assert not recorded([found], sources, place)


def test_a_file_that_no_worker_can_reach_is_named(tmp_path, place):
    found, sources = write_file(tmp_path)
    cut = cut_file(found, sources, place)
    Path(found.uri).unlink()
    with refusal(re.escape("a.parquet was removed while the build ran. Put it back")):
        copy_of(cut, sources, place)
    Path(found.uri).parent.rmdir()
    with refusal(re.escape(f"cannot read {found.uri}. Put sources where every")):
        copy_of(cut, sources, place)


def on_the_hub(hub: StandInHub, **files: bytes) -> tuple[list[FoundFile], tuple[Source, ...]]:
    """Parquet files of a repository, as they are found there."""
    hub.commit("org/text", {f"{name}.parquet": content for name, content in files.items()})
    source = Source(hub=HubDataset(path="org/text"))
    return list(resolve_hub(source, 0).files), (source,)


def parquet_bytes(tmp_path: Path, text: str) -> bytes:
    write_file(tmp_path, text)
    return (tmp_path / "data/a.parquet").read_bytes()


def test_a_parquet_file_on_the_hub_is_cut_by_its_end_alone(stand_in_hub, tmp_path, place):
    """The cuts are those of the whole file, and so is all that is said of it; the file itself is not fetched."""
    body = parquet_bytes(tmp_path, "document" * 100_000)
    (found,), sources = on_the_hub(stand_in_hub, a=body)
    assert found.content == f"sha256:{hashlib.sha256(body).hexdigest()}"
    cut = cut_file(found, sources, place)
    assert stand_in_hub.count("/resolve/", "GET") == 1
    assert list(Path(place.scratch).rglob("*.part")) == list((tmp_path / "huggingface").rglob("*.parquet")) == []

    whole = look_into(found._replace(content=None, immutable=None), sources, SLICE_BYTES, place)
    assert cut.cuts == whole.cuts
    assert cut.file.identity() == whole.file.identity()
    assert recorded([found], sources, place) == {found: cut}
    assert copy_of(cut, sources, place).read_bytes() == body
    lie = cut_file(found._replace(content=f"sha256:{'0' * 64}"), sources, place)
    with refusal(re.escape("a.parquet changed while the build read it")):
        copy_of(lie, sources, place)


@pytest.mark.parametrize("end_bytes", [8, 100, 1 << 20])
def test_an_end_of_any_length_is_read(
    stand_in_hub,
    tmp_path,
    place,
    monkeypatch,
    end_bytes,
):
    monkeypatch.setattr(tasks.download.outlines, "END_BYTES", end_bytes)
    (found,), sources = on_the_hub(stand_in_hub, a=parquet_bytes(tmp_path, "document"))
    assert look_into(found, sources, SLICE_BYTES, place).file.location == ""


@pytest.mark.parametrize("body", [b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1"])
def test_what_is_no_parquet_file_is_an_error_that_names_it(
    stand_in_hub,
    place,
    body,
):
    (found,), sources = on_the_hub(stand_in_hub, a=body)
    with refusal(re.escape("a.parquet cannot be read as parquet")):
        cut_file(found, sources, place)
    assert list(Path(place.scratch).rglob("*.part")) == []


def test_files_are_fetched_ahead_in_the_order_of_their_slices(tmp_path, place, fetched, monkeypatch):
    """Each once, and those that are here not at all; a file that cannot be had is an error for whoever wants it."""
    monkeypatch.setattr(tasks.download.cut, "FETCHERS", 1)
    parts = []
    for name in ("c", "a", "b", "gone", "here"):
        found, sources = write_file(tmp_path, name)
        shutil.copy(found.uri, tmp_path / f"{name}.parquet")
        there = {"name": name, "uri": f"file://{tmp_path}/{name}.parquet", "immutable": None}
        mine = place._replace(scratch=str(tmp_path / name))
        cut = look_into(found._replace(**there), sources, SLICE_BYTES, mine)
        parts += sliced(cut)
        if name != "here":
            shutil.rmtree(tmp_path / name)
    (tmp_path / "gone.parquet").unlink()
    fetched.clear()
    with fetched_ahead(parts, sources, place):
        pass  # leaving waits for what is under way, and for no more
    assert "gone" not in fetched
    with fetched_ahead(parts, sources, place):
        for name in ("b", "a", "c"):  # waits for each: leaving the block gives up the files that were not begun
            wanted = next(part for part in parts if part.ranges[0].file.name == name)
            assert Path(at_hand(wanted, sources, place).ranges[0].file.location).exists()
        with refusal("gone", OSError):
            at_hand(next(part for part in parts if part.ranges[0].file.name == "gone"), sources, place)
    assert sorted(set(fetched)) == ["a", "b", "c", "gone"]
    assert fetched.count("c") == 1


def test_halves_of_tables_that_killed_processes_left_go(place, tmp_path):
    """With the next table that is written. Files that are being fetched stay."""
    files = tmp_path / "out/_cache/files"
    files.mkdir(parents=True)
    for name in (f".{'a' * 64}.table.0123abcd.part", f".{'a' * 64}.table.ed25519.0123abcd.part", ".other.json.0123abcd.part"):
        (files / name).write_bytes(b"half")
    cut_file(*write_file(tmp_path), place)
    assert [path.name for path in files.glob(".*.part")] == [".other.json.0123abcd.part"]
    assert len(list(files.glob("*.table"))) == 1


def test_columns_of_directories_are_those_of_the_name_that_a_file_has_now(tmp_path, place):
    """By its content a file is known under another name, if its directories name the same columns."""
    path = tmp_path / "in/lang=en/x.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    source = Source(name="s", path=str(tmp_path / "in"), keep_columns=("lang",))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = FoundFile(0, "lang=en/x.parquet", str(path), path.stat().st_size, "etag:1", f"sha256:{digest}")
    cut = cut_file(found, (source,), place)
    assert cut.file.partitions == (("lang", "en"),)
    moved = found._replace(name="lang=fr/x.parquet", immutable="etag:2")
    other = found._replace(name="x.parquet", immutable="etag:3")
    known = recorded([found, moved, other], (source,), place)
    assert {file.name: of.file.partitions for file, of in known.items()} == {
        "lang=en/x.parquet": (("lang", "en"),),
        "lang=fr/x.parquet": (("lang", "fr"),),
    }
