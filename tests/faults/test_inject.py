"""The library of the harness: what a fault does to which operation, what is counted, and what a disk keeps."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import KINDS, Fault
from tests.faults.power_loss import OUTCOMES, Disk, write_tree
from tests.processes import python

PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
import numpy as np
from tests.faults.inject import Fault, Watch
here, fault, record = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "record"
watch = Watch(here, Fault(*fault) if fault else None, record)
watch.install()
try:
{}
except OSError as error:
    print(json.dumps([error.errno, error.filename and str(error.filename)]))
else:
    print(json.dumps([watch.counts, watch.fired, watch.recorded], default=list))  # bytes are lists of numbers
"""


def run(here: Path, program: str, fault: Fault | None = None, record: bool = False) -> Any:
    """What a program prints that has *fault* done to it: its error, or counts, what the fault met, and what was recorded."""
    code = PROGRAM.format("".join(f"    {line}\n" for line in program.strip().splitlines()))
    arguments = [str(here), json.dumps(fault), "record" if record else ""]
    done = python("-c", code, *arguments)
    assert done.stdout, f"{done.returncode} {done.stderr}"
    return json.loads(done.stdout)


EVERY_KIND = """
(here / "d").mkdir()
with open(here / "d" / "a", "wb") as file:
    file.write(b"12345678")
    file.flush()
    os.fsync(file.fileno())
    file.truncate(4)
os.link(here / "d" / "a", here / "d" / "b")
os.rename(here / "d" / "b", here / "c")
assert (here / "c").read_bytes() == b"1234"
assert os.listdir(here) and os.stat(here / "c").st_size
shutil.rmtree(here / "d")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_of_any_kind_fails(tmp_path, kind):
    """Once, with the system's own error, which names a path where the call has one."""
    code, filename = run(tmp_path, EVERY_KIND, Fault(kind, 1, "EIO"))
    assert code == errno.EIO
    assert (filename is None) == (kind in ("write", "truncate", "fsync", "read"))


EACH_OF_FOUR = """
failed = []
for name in "abcd":
    try:
        (here / name).write_bytes(b"")
    except OSError:
        failed.append(name)
raise OSError(0, "", "".join(failed))
"""
DIRECTLY = "raise OSError(os.write(os.open(here / 'a', os.O_WRONLY | os.O_CREAT), bytes(10)), '')"
IN_BUFFERS = "(here / 'b').write_bytes(bytes(10)); raise OSError(len((here / 'b').read_bytes()), '')"
MADE = """
try:
    os.mkdir(here / 'a')
except OSError as error:
    raise OSError(error.errno, "", os.listdir(here)[0])
"""
IN_LIBRARIES = """
import tempfile
with tempfile.TemporaryFile(dir=here) as file:
    np.save(file, np.arange(9))
"""


@pytest.mark.parametrize(
    ("program", "fault", "said"),
    [
        (EACH_OF_FOUR, Fault("create", 2, "ENOSPC", lasting=True), [0, "bcd"]),
        # Half of a read or write: what buffers asks again; who calls the system by himself sees it.
        (DIRECTLY, Fault("write", 1, "short"), [5, None]),
        (IN_BUFFERS, Fault("read", 1, "short"), [10, None]),
        (MADE, Fault("mkdir", 1, "EIO done"), [errno.EIO, "a"]),
        (IN_LIBRARIES, Fault("write", 1, "EIO"), [errno.EIO, None]),
    ],
)
def test_a_fault_meets_its_operation_alone(tmp_path, program, fault, said):
    assert run(tmp_path, program, fault) == said


def test_death_is_within_a_write(tmp_path):
    with pytest.raises(AssertionError, match=r"^-9 "):
        run(
            tmp_path, "(here / 'a').write_bytes(b'12345678'); os.rename(here / 'a', here / 'b')", Fault("write", 1, "kill within")
        )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"1234"}


SYNCED = """
fd = os.open(here / "new", os.O_WRONLY | os.O_CREAT)
os.write(fd, b"new")
SYNC_FILE
os.close(fd)
os.rename(here / "new", here / "old")
SYNC_DIRECTORY
"""


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("directory", [False, True])
def test_a_disk_keeps_what_was_synced(tmp_path, file, directory):
    """A name comes with the sync of its directory, bytes with that of their file."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "old").write_bytes(b"old")
    disk = Disk(here)
    program = SYNCED.replace("SYNC_FILE", "os.fsync(fd)" if file else "")
    program = program.replace("SYNC_DIRECTORY", "os.fsync(os.open(here, os.O_RDONLY))" if directory else "")
    for operation in recorded(here, program):
        disk.apply(operation)
    states = {outcome: disk.state(outcome, 0).tree for outcome in OUTCOMES}
    assert states["dropped"] == {"old": (b"new" if file else b"") if directory else b"old"}
    assert states["names"] == {"old": b"new" if file else b""}
    write_tree(states["names"], tmp_path / "after")
    assert (tmp_path / "after/old").read_bytes() == states["names"]["old"]


def test_a_disk_that_synced_everything_holds_everything(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    disk = Disk(here)
    program = """
os.makedirs(here / "a" / "b")
(here / "a" / "b" / "file").write_bytes(b"1" * 100_000)
os.link(here / "a" / "b" / "file", here / "a" / "again")
os.symlink("a/again", here / "link")
os.truncate(here / "a" / "again", 9)
os.rename("b", here / "c", src_dir_fd=os.open(here / "a", os.O_RDONLY))
(here / "c" / "gone").touch()
os.unlink(here / "c" / "gone")
for place in (here, here / "a", here / "c", here / "a" / "again"):
    os.fsync(os.open(place, os.O_RDONLY))
"""
    for operation in recorded(here, program):
        disk.apply(operation)
    for outcome in OUTCOMES:
        assert disk.state(outcome, 1).tree == {"a": None, "a/again": b"1" * 9, "c": None, "c/file": b"1" * 9, "link": "a/again"}


def recorded(here: Path, program: str) -> list[tuple[Any, ...]]:
    """What a program changed, recorded in a process of its own; it may open what it likes."""
    _, _, operations = run(here, program, record=True)
    return [tuple(bytes(one) if isinstance(one, list) else one for one in operation) for operation in operations]
