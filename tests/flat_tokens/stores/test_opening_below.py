"""With roots set, no place that opens a path is led out of them by a link, whichever step of the path it replaces."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import tokenizers

import flat_tokens
from flat_tokens.arrays import maps
from flat_tokens.formats import FORMATS, open_any
from flat_tokens.stores import reading
from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS
from flat_tokens.stores.store import Store
from flat_tokens.text.formats import FORMATS as TEXT_FORMATS
from flat_tokens.text.rows import TextFile
from flat_tokens.tools.export import export_of, write
from flat_tokens.vocabulary import beside, resolve
from tasks.derive.inputs import examine, read_keys
from tasks.text.runs import descriptor as run_descriptor
from tests import doors
from tests.examples import SOME_OR_ALL
from tests.made import docs_of, foreign, publish_docs
from tests.refusal import refusal
from tests.sources import arrow_bytes, parquet_bytes

REFUSED = "leads out of what may be read here"
SIZE = 1 << 19


class Place(NamedTuple):
    """A place that opens a path: what makes the files below a directory, and what reads them."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]


def written(name: str, data: bytes) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return make


def of_text(name: str, kind: Any, data: bytes) -> Place:
    def read(root: Path) -> object:
        file = TextFile(str(root / name), name, len(data), "text")
        return [list(TEXT_FORMATS[kind].read(file, one)) for one in TEXT_FORMATS[kind].ranges(file, 1 << 20)]

    return Place(written(name, data), read)


def of_format(name: str) -> Place:
    options = {"end_of_text": 50256} if hasattr(FORMATS[name].options, "end_of_text") else {}

    def make(root: Path) -> None:
        publish_docs(root.parent / "made", docs_of((1, 2, 3), (4, 5)), docs_of((6, 7), key=9))
        write(export_of(root.parent / "made", name, options), root)

    def read(root: Path) -> object:
        splits = open_any(root, name, FORMATS[name].options(**options)).splits
        assert splits
        return [list(split.batches(0, split.seq_count)) for split in splits.values()]

    return Place(make, read)


def everything(root: Path) -> object:
    dataset = flat_tokens.open(root)
    return [split.sequence(0) for split in (dataset.train, dataset.validation)], examine(str(root)), flat_tokens.verify(root)


def whole_array(root: Path) -> object:
    split = open_any(root / "data/train").splits["train"]
    return list(split.batches(0, split.seq_count))


def tokenizer(root: Path) -> None:
    (root / "d").mkdir(exist_ok=True)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(root / "d/tokenizer.json"))
    (root / "d/chat_template.jinja").write_text("a")
    (root / "d/ranks.tiktoken").write_text("YQ== 0\n")


TABLE = pa.table({"text": ["one", "two"]})
LARGE = written("d/x", b"s" * SIZE)
LINES = b'{"text": "one"}\n{"text": "two"}\n'
PLACES: dict[str, Place] = {
    "store, whole": Place(LARGE, lambda root: Store.at(root).read("d/x")),
    "store, range": Place(LARGE, lambda root: Store.at(root).read_range("d/x", 0, 1)),
    "store, ranges": Place(LARGE, lambda root: Store.at(root).read_ranges(["d/x"], [-1], [None])),
    "store, blocks": Place(LARGE, lambda root: list(Store.at(root).blocks("d/x"))),
    "store, digest": Place(LARGE, lambda root: Store.at(root).digest("d/x")),
    "store, opened": Place(LARGE, lambda root: Store.at(root).open("d/x").close()),
    "store, past the page cache": Place(
        LARGE, lambda root: Store.at(root, read_once=True).borrow_range("d/x", 0, SIZE).__enter__()
    ),
    "map": Place(LARGE, lambda root: maps.map_file(str(root / "d/x"), ValueError)),
    "library": Place(LARGE, lambda root: reading.library_path(root / "d/x").__enter__()),
    "without links": Place(LARGE, lambda root: reading.resolved_path(root / "d/x")),
    "run of small files": Place(LARGE, lambda root: os.close(run_descriptor(str(root / "d/x")))),
    "keys": Place(written("d/x", b"00" * 8 + b"\n"), lambda root: read_keys(str(root / "d/x"))),
    "text": of_text("d/a.txt", "text", b"one\ntwo\n"),
    "jsonl": of_text("d/a.jsonl", "jsonl", LINES),
    "csv": of_text("d/a.csv", "csv", b"text\none\ntwo\n"),
    "parquet": of_text("d/a.parquet", "parquet", parquet_bytes(TABLE)),
    "arrow": of_text("d/a.arrow", "arrow", arrow_bytes(TABLE)),
    "tokenizer.json": Place(tokenizer, lambda root: resolve(str(root / "d/tokenizer.json"))),
    "directory of a tokenizer": Place(tokenizer, lambda root: resolve(str(root / "d"))),
    "ranks": Place(tokenizer, lambda root: resolve(str(root / "d/ranks.tiktoken"))),
    "chat template": Place(tokenizer, lambda root: beside(str(root / "d"), "chat_template.jinja")),
    "dataset": Place(lambda root: publish_docs(root, docs_of((1, 2, 3)), docs_of((4, 5))), everything),
    "arrays alone": Place(lambda root: foreign(root / "data", [[1, 2, 3]], [[4, 5]]), whole_array),
    **{name: of_format(name) for name in FORMATS},
}
READ_BY = {"tokenizer.json": "d/tokenizer.json", "directory of a tokenizer": "d/tokenizer.json", "ranks": "d/ranks.tiktoken"}


def steps(root: Path, name: str) -> Iterator[Path]:
    """Every directory and file below *root* that is on the way to a file which a place reads."""
    for path in sorted(root.rglob("*")):
        below = path.relative_to(root).as_posix()
        if name == "chat template" and path.suffix in (".json", ".tiktoken"):
            continue
        if name in READ_BY and not READ_BY[name].startswith(below):
            continue
        yield path


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    root = tmp_path / "root"
    root.mkdir()

    def bound() -> Path:
        monkeypatch.setenv(INPUT_ROOTS, str(root))
        monkeypatch.setenv(OUTPUT_ROOTS, str(root))
        return root

    return bound


@pytest.mark.parametrize("name", PLACES)
@SOME_OR_ALL
def test_no_link_at_any_step_leads_a_reader_out(name, tmp_path, rooted, is_whole, monkeypatch):
    """Each file and directory below a root is in turn replaced by a link to itself elsewhere. What was read before is refused."""
    place, opened, refused = PLACES[name], [], 0
    place.make(tmp_path / "root")
    root = rooted()
    place.read(root)
    real = reading._opened_within

    def noted(path: str, flags: int, roots: str) -> int:
        found = real(path, flags, roots)
        opened.append(os.readlink(f"/proc/self/fd/{found}"))
        return found

    monkeypatch.setattr(reading, "_opened_within", noted)
    for number, path in enumerate(steps(root, name)):
        if path.is_symlink():
            continue
        away = tmp_path / f"outside{number}"
        os.rename(path, away)
        both = str(away), os.path.relpath(away, path.parent)
        for link in both if is_whole else [both[number % 2]]:
            path.symlink_to(link)
            try:
                place.read(root)
            except (ValueError, OSError):
                refused += 1
            path.unlink()
        os.rename(away, path)
    assert not [path for path in opened if not path.startswith(f"{root}/")]
    assert refused
    place.read(root)


def test_links_within_the_roots_are_followed(rooted, tmp_path):
    root = rooted()
    (root / "a").mkdir()
    (root / "a/x").write_bytes(b"a")
    (root / "b").symlink_to(root / "a")
    assert Store.at(root / "b").read("x") == b"a"
    (tmp_path / "name").symlink_to(root)
    assert Store.at(tmp_path / "name/a").read("x") == b"a"


def test_a_root_may_be_a_link_and_a_file(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_bytes(b"one")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/two.txt").write_bytes(b"two")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    monkeypatch.setenv(INPUT_ROOTS, f"{tmp_path}/one.txt,{tmp_path}/link,gs://bucket")
    monkeypatch.setenv(OUTPUT_ROOTS, "gs://bucket")
    assert Store.at(tmp_path).read("one.txt") + Store.at(tmp_path / "link").read("two.txt") == b"onetwo"
    (tmp_path / "one.txt2").write_bytes(b"one")
    with refusal(REFUSED):
        Store.at(tmp_path).read("one.txt2")


def test_fetched_files_are_opened_where_they_are_kept_and_from_nowhere_else(tmp_path, monkeypatch, rooted):
    """The worker's scratch directory and the hub's cache are outside of the roots: no link below a root leads into them."""
    for name, variable in (("scratch", "FLAT_TOKENS_SCRATCH"), ("hub", "HF_HUB_CACHE")):
        monkeypatch.setenv(variable, str(tmp_path / name))
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"fetched")
        (rooted() / name).symlink_to(tmp_path / name / "x")
        assert Store.at(tmp_path / name).read("x") == b"fetched"
        with refusal(REFUSED):
            Store.at(rooted()).read(name)


def test_where_outputs_have_no_roots_they_are_read_by_their_own_paths(tmp_path, monkeypatch):
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out/x").write_bytes(b"made")
    (tmp_path / "in/x").symlink_to(tmp_path / "out/x")
    monkeypatch.setenv(INPUT_ROOTS, str(tmp_path / "in"))
    monkeypatch.delenv(OUTPUT_ROOTS, raising=False)
    assert Store.at(tmp_path / "out").read("x") == b"made"
    with refusal(REFUSED):
        Store.at(tmp_path / "in").read("x")


def test_a_device_is_refused_before_it_is_opened(rooted):
    root = rooted()
    os.mkfifo(root / "pipe")
    with refusal("is not a plain file"):
        Store.at(root).read("pipe")
    (root / "device").symlink_to("/dev/zero")
    with refusal(REFUSED):
        Store.at(root).read("device")
    (root / "magic").symlink_to("/proc/self/root/etc/hostname")
    with pytest.raises((ValueError, FileNotFoundError)):
        Store.at(root).read("magic")


def test_a_temporary_file_is_opened_while_it_is_lent(tmp_path, rooted):
    rooted()
    (tmp_path / "temporary").write_bytes(b"unpacked")
    with reading.lent(tmp_path / "temporary"):
        assert Store.at(tmp_path).read("temporary") == b"unpacked"
    with refusal(REFUSED):
        Store.at(tmp_path).read("temporary")


def test_what_else_opens_a_path_is_found(tmp_path):
    """In a program of ours; ``make check`` looks through those that there are."""
    calls = (
        "open(p)",
        "os.open(p, 0)",
        "Path(p).read_text()",
        "np.load(p)",
        "pa.OSFile(p)",
        "store.fs.open(p)",
        "pa.memory_map(p)",
    )
    for floor in doors.FLOORS:
        (tmp_path / floor).mkdir()
    (tmp_path / "tasks/new.py").write_text("\n".join(f"def f{n}():\n    return {call}" for n, call in enumerate(calls)))
    assert len([fault for fault in doors.faults(tmp_path) if fault.startswith("tasks/new.py")]) == len(calls)
