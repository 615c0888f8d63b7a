"""With roots set, no command opens, makes or removes anything outside of them, whichever step of a path is a link.

The kernel is the witness: it reports every access to what a link leads to, by whatever library.
"""

import contextlib
import ctypes
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers

from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS
from flat_tokens.tools.cli import main
from tests.faults.support import build_here, derive_here, import_here, settings_of, write_notes
from tests.sources import write_rows

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is opened")]

OPEN, MODIFY, CREATE, DELETE, MOVED, IS_DIRECTORY = 0x20, 0x2, 0x100, 0x200, 0xC0, 0x40000000
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Watched:
    """What happens to the files below a directory: paths, but for directories that are listed."""

    def __init__(self, top: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file, self._paths = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), {}
        assert self._file >= 0
        for path in (top, *top.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                mask = OPEN | MODIFY | CREATE | DELETE | MOVED
                self._paths[self._libc.inotify_add_watch(self._file, os.fsencode(path), mask)] = path

    def ended(self) -> set[Path]:
        found = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._file, 1 << 20):
                while data:
                    number, mask, _, size = struct.unpack_from("iIII", data)
                    name, data = data[16 : 16 + size].rstrip(b"\0").decode(), data[16 + size :]
                    if not (mask & OPEN and mask & IS_DIRECTORY):
                        found.add(self._paths[number] / name)
        os.close(self._file)
        return found


def write(root: Path) -> None:
    """Sources of each kind, a tokenizer with a template, and lists of keys."""
    write_notes(root / "in/notes.jsonl", 12)
    (root / "in/small/more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (root / "in/small" / name).write_text(f"text of {name} " * 9)
    write_rows(root / "in/rows.parquet", [{"id": f"{i}", "text": f"row {i}", "kind": i % 2} for i in range(9)], group=9)
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (root / "in/talks.jsonl").write_text(json.dumps({"talk": talk}) + "\n")
    (root / "in/ids.txt").write_text("1\n2\n3\n")
    (root / "tokenizer").mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(root / "tokenizer/tokenizer.json"))
    (root / "tokenizer/chat_template.jinja").write_text(TEMPLATE)
    build_here(rows(root))
    assert main(["export", f"{root}/out", f"{root}/exported", "--to", "mds"]) == 0
    assert main(["export", f"{root}/out", f"{root}/indexed", "--to", "megatron", "--end-of-text", "300"]) == 0


def rows(root: Path, **more: Any) -> dict[str, Any]:
    return settings_of(root / "out", root / "in/rows.parquet", keep=["kind"], **more)


def build(source: dict[str, Any], **more: Any) -> Callable[[], object]:
    return partial(build_here, {**settings_of(NEW), "sources": [source], **more})


def derived(operation: str | dict[str, Any], *more: str, **settings: Any) -> Callable[[], object]:
    return partial(derive_here, operation, "root/out", *more, output=NEW, **settings)


NEW = "root/new"
COMMANDS: dict[str, Callable[[], object]] = {
    "build of lines": build({"path": "root/in/notes.jsonl", "id_column": "id"}),
    "build of a directory": build({"path": "root/in/small"}),
    "build of a pattern": build({"path": "root/in/small/**/*.txt"}),
    "build of conversations": build({"path": "root/in/talks.jsonl", "messages_column": "talk"}, tokenizer="root/tokenizer"),
    "build again": partial(build_here, rows(Path("root"), split_seed=1)),
    "merge": derived("merge", "root/out"),
    "subset by keys": derived({"operation": "subset", "id_list": "root/in/ids.txt"}),
    "subset by columns": derived({"operation": "subset", "where": "kind = 1"}),
    "shuffle": derived("shuffle"),
    "relayout": derived("relayout", layout="compact"),
    "import of MDS": partial(import_here, "root/exported", NEW),
    "import of Megatron": partial(import_here, "root/indexed", NEW, options={"end_of_text": 300}),
    **{
        name: partial(main, words.split())
        for name, words in {
            "export": "export root/out root/new --to mds",
            "export again": "export root/out root/exported --to mds",
            "verify": "verify root/out --full",
            "verify a sample": "verify root/out --sample 1/1 --source root/in",
            "verify a sample with trust": "verify root/out --sample 1/1 --trust-records",
            "trace": "trace root/out --sequence 1 --source root/in",
            "trace with trust": "trace root/out --sequence 1 --trust-records",
            "stats": "stats root/out",
            "inspect": "inspect root/out --sequence 1",
            "inspect another format": "inspect root/exported",
        }.items()
    },
}


NIGHTLY = {"merge", "subset by keys", "shuffle", "relayout", "build again", "export again", "verify a sample", "trace with trust"}
"""Their ways through the code are others', for the most part."""
READERS = ("verify", "trace", "stats", "inspect")
"""Commands that change nothing: what was there is there afterwards."""


class Scene(NamedTuple):
    """The directory below which runs are bound, a copy of it as it was, and what its links lead to."""

    root: Path
    copy: Path
    outside: Path

    def restore(self) -> None:
        for path in (self.root, self.outside):
            shutil.rmtree(path, ignore_errors=True)
        self.outside.mkdir()
        shutil.copytree(self.copy, self.root, symlinks=True)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    path = tmp_path_factory.mktemp("linked")
    made = Scene(path / "root", path / "copy", path / "outside")
    made.root.mkdir()
    write(made.root)
    shutil.copytree(made.root, made.copy, symlinks=True)
    return made


def steps(root: Path, copy: Path, seen: set[Path]) -> Iterator[Path]:
    """Everything that a command came by and that was there before it: files, and the directories above them."""
    there = {above for path in seen for above in (path, *path.parents) if above.is_relative_to(root) and above != root}
    return (path for path in sorted(there) if (copy / path.relative_to(root)).exists())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in COMMANDS])
def test_no_command_is_led_out(name, scene, tmp_path, monkeypatch, capsys):
    for variable in (INPUT_ROOTS, OUTPUT_ROOTS):
        monkeypatch.setenv(variable, str(scene.root))
    monkeypatch.setenv("FLAT_TOKENS_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(scene.root.parent)
    scene.restore()
    watched = Watched(scene.root)
    done = COMMANDS[name]()
    assert not isinstance(done, int) or done == 0, capsys.readouterr()
    linked, reads = 0, name.startswith(READERS)
    for path in steps(scene.root, scene.copy, watched.ended()):
        if not reads:
            scene.restore()
        if path.is_symlink():
            continue
        outside = scene.outside / path.name
        os.rename(path, outside)
        path.symlink_to(outside)
        linked += 1
        watched = Watched(scene.outside)
        with contextlib.suppress(ValueError, OSError):
            COMMANDS[name]()
        assert not watched.ended(), path
        if reads:
            path.unlink()
            os.rename(outside, path)
    assert linked
