"""The command of the benchmarks runs, its text does not repeat, and its page keeps what it does not measure."""

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.__main__ import TABLES, about_of
from tests.benchmarks.bench import HERE, ROOT, Grid, run_whole
from tests.benchmarks.corpus import FILES, Corpus, gather
from tests.benchmarks.page import page, rendered, sections_of, title_of
from tests.benchmarks.peers import PEERS, equal
from tests.processes import python


def package(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def texts(corpus: Corpus) -> list[tuple[str, str]]:
    tables = [pq.read_table(path).to_pydict() for path in corpus.paths]
    return [pair for table in tables for pair in zip(table["id"], table["text"], strict=True)]


def test_text_does_not_repeat(tmp_path: Path) -> None:
    """A file of the same content is taken once, and one version of a package."""
    one = package(tmp_path / "one", {"site-packages/a/x.py": "x = 1\n", "site-packages/a/y.py": "y\n", "copy/of_x.py": "x = 1\n"})
    two = package(tmp_path / "two", {"dist-packages/a/x.py": "x = 2\n", "lib-3.1/z.h": "z\n", "lib-3.2/z.h": "zz\n"})
    found = texts(gather(tmp_path / "text", 1000, [one, two]))
    assert sorted(text for _, text in found) == ["x = 1\n", "y\n", "z\n"]
    assert len({name for name, _ in found}) == 3


def test_text_is_what_can_be_read_as_text(tmp_path: Path) -> None:
    packed = gzip.compress(b"changes\n")
    files: dict[str, str | bytes] = {
        "a.py": "a\n",
        "empty.py": " \n",
        "data.json": "{}",
        "zero.txt": "\0",
        "latin.txt": b"\xe9t\xe9",
    }
    root = package(tmp_path / "root", {**files, "doc/changes.gz": packed, "doc/damaged.gz": packed[:-4]})
    (root / "link.py").symlink_to(root / "data.json")
    assert sorted(text for _, text in texts(gather(tmp_path / "text", 1000, [root]))) == ["a\n", "changes\n"]


def test_text_is_the_same_again_and_a_share_is_its_beginning(tmp_path: Path) -> None:
    root = package(tmp_path / "root", {f"{i}.py": f"{i}" * 100 for i in range(50)})
    once, again = (gather(tmp_path / name, 3200, [root]) for name in ("once", "again"))
    assert [path.read_bytes() for path in once.paths] == [path.read_bytes() for path in again.paths]
    assert len(once.paths) == FILES
    assert 3200 <= once.text_bytes < 6400
    assert once.text_bytes == sum(len(text) for _, text in texts(once))
    part = once.first(2, tmp_path / "part")
    assert texts(part) == texts(once)[: part.documents]
    assert gather(tmp_path / "once", 3200, [tmp_path / "nowhere"]) == once  # it is there already


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no text below"):
        gather(tmp_path / "text", 10, [tmp_path / "nowhere"])


def test_what_is_not_measured_stays_on_the_page() -> None:
    old = page(["A", "B"], {"A": "## A\n\nold\n", "B": "## B\n\nold\n"}, "")
    new = rendered("B.\n\nProse.", "command", "today", [Grid(["", "s"], [["row", "1.5 s"]])])
    assert sections_of(page(["A", "B", "C"], {"B": new}, old)) == {
        "A": "## A\n\nold\n",
        "B": "## B\n\nProse.\n\n```\ncommand\n```\n\ntoday\n\n|  | s |\n| --- | ---: |\n| row | 1.5 s |\n",
    }


def test_every_section_of_the_page_is_a_table_of_the_command() -> None:
    """So that --only replaces it, and a whole run leaves nothing out."""
    sections = sections_of((ROOT / "docs" / "measured" / "benchmarks.md").read_text("utf-8"))
    assert set(sections) <= {title_of(about_of(name)) for name in TABLES}


def test_peak_memory_is_not_that_of_the_process_that_measures() -> None:
    here = np.ones(100 << 17)  # 100 MiB
    assert run_whole([sys.executable, "-S", "-c", "print(1)"]).peak < 50 << 20 < here.nbytes


def test_a_program_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1.*over"):
        run_whole([sys.executable, "-c", "raise ValueError('over')"])


def test_documents_that_differ_are_counted() -> None:
    a, b = np.array([1, 2]), np.array([3])
    assert equal([a, b, a], [a, a]) == (1, 3)


def test_every_peer_has_a_program_and_pinned_versions() -> None:
    for name, peer in PEERS.items():
        assert (HERE / "peer_programs" / f"with_{name}.py").exists()
        assert "--hash=sha256:" in (HERE / "peer_programs" / f"{peer.packages[0]}.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere")).is_dir(), reason="no vocabularies here")
@pytest.mark.parametrize(
    "tables", [("build", "duplicates"), pytest.param(TABLES, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_the_command_runs(tmp_path: Path, tables: tuple[str, ...]) -> None:
    """Every table but the peers, which are installed from a package index."""
    page = tmp_path / "page.md"
    options = ("--quick", "--no-installs", "--scratch", str(tmp_path), "--page", str(page), "--only", *tables)
    done = python("-m", "tests.benchmarks", *options, timeout=None)
    sections = sections_of(page.read_text("utf-8"))
    assert done.returncode == 0, done.stderr
    assert list(sections) == [title_of(about_of(name)) for name in tables]
    assert all("\n| ---" in section for section in sections.values())
