"""The command of the benchmarks runs, its text does not repeat, and its page keeps what it does not measure."""

import gzip
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.benchmarks.__main__ import TABLES, about_of
from tests.benchmarks.bench import Grid
from tests.benchmarks.corpus import gather
from tests.benchmarks.page import page, rendered, sections_of, title_of
from tests.processes import ROOT, python


def test_text_is_what_can_be_read_as_text_and_does_not_repeat(tmp_path: Path) -> None:
    """A file of the same content is taken once, and one version of a package."""
    packed = gzip.compress(b"changes\n")
    files = {
        "one/site-packages/a/x.py": b"x = 1\n",
        "one/copy/of_x.py": b"x = 1\n",
        "two/dist-packages/a/x.py": b"x = 2\n",
        "two/lib-3.1/z.h": b"z\n",
        "two/lib-3.2/z.h": b"zz\n",
        "two/empty.py": b" \n",
        "two/data.json": b"{}",
        "two/zero.txt": b"\0",
        "two/latin.txt": b"\xe9t\xe9",
        "two/doc/changes.gz": packed,
        "two/doc/damaged.gz": packed[:-4],
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "two/link.py").symlink_to("data.json")
    found = gather(tmp_path / "text", 1000, [tmp_path / "one", tmp_path / "two"])
    texts = [text for path in found.paths for text in pq.read_table(path)["text"].to_pylist()]
    assert sorted(texts) == ["changes\n", "x = 1\n", "z\n"]
    assert found.text_bytes == sum(map(len, texts))


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
