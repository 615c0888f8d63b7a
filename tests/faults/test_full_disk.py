"""A disk that is really full, limited or read-only: no success is claimed, one line says why, and a rerun completes."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.support import (
    Settings,
    build_here,
    command,
    staged,
    version_digests,
)
from tests.processes import ROOT, python


def write_config(settings: Settings, directory: Path) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(settings))
    return path


# It may write no file above a limit. A fork that runs Python, as by preexec_fn, would meet the threads of other tests' libraries.
WITH_LIMIT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
os.execv(sys.argv[2], sys.argv[2:])
"""


PUT = """
import sys
from pathlib import Path
import numpy as np
from flat_tokens.stores.store import Store
from tasks.output.leases import attempt
from tests.faults.inject import Fault, Watch
here, fault, size, what = sys.argv[1:]
if fault:
    Watch(here, Fault("write", 1, fault, lasting=True)).install()
try:
    if what == "object":
        Store.at(here).put("object", bytes(int(size)))
    else:
        with attempt(Store.at(here), Path(here), "version") as place:
            place.write("object", np.zeros(int(size), bool))
except OSError as error:
    print(error)
"""
FULL = "[Errno 28] No space left on device. Make room and run the same command again"


@pytest.mark.parametrize("what", ["object", "array of the staging"])
@pytest.mark.parametrize(
    ("fault", "limit", "size", "told"),
    [
        *(("ENOSPC", resource.RLIM_INFINITY, size, FULL) for size in (1000, 9 << 20)),
        *(("", limit, 10_000_000, "[Errno 27] File too large") for limit in (100_000, 4 << 20, 5_000_001)),
    ],
)
def test_error_of_a_full_disk_or_a_limit_names_the_object_and_the_remedy(tmp_path, what, fault, limit, size, told):
    """Of a small object, and of one that is written past the page cache, where a write that does not end at a block's end is
    refused as invalid: that is not the cause.
    """
    run = python("-c", WITH_LIMIT, str(limit), sys.executable, "-c", PUT, str(tmp_path), fault, str(size), what)
    place = re.escape(str(tmp_path)) + ("" if what == "object" else r"/_staging/version/\w+")
    assert re.fullmatch(rf"{re.escape(told)}: '{place}/object'\n", run.stdout), run.stdout + run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_full_file_system_fails_the_command_in_one_line_and_more_room_completes_it(settings, tmp_path):
    """A small file system, which nobody else sees. Read-only, it is refused in one line, too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = write_config({**settings, "output": str(disk / "out")}, tmp_path)
    build = " ".join(command(config))
    script = f"""
        mount -t tmpfs -o size=400k none {disk} || exit 77
        status=0; {build} 2>&1 || status=$?; echo "status $status"
        test ! -e {disk}/out/latest.json
        mount -o remount,size=64m {disk}
        {build} --json > {tmp_path}/result.json
        mount -o remount,ro {disk}
        cp -r {disk}/out {tmp_path}/out
        {build} --set output={disk}/other 2>&1 || true
    """
    run = subprocess.run(
        ["unshare", "-m", "sh", "-euc", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if run.returncode == 77 or "unshare failed" in run.stderr:
        pytest.skip("a file system of our own cannot be mounted here")
    assert run.returncode == 0, run.stderr
    full, status, refused = run.stdout.splitlines()
    assert full.startswith("flat-tokens-service build: No space left on device. Make room and run the same command again: ")
    assert str(disk) in full
    assert status == "status 1"
    assert (
        refused
        == f"flat-tokens-service build: cannot write to output {disk}/other: Read-only file system. Choose another output."
    )
    calm = build_here({**settings, "output": str(tmp_path / "calm")})
    assert version_digests(tmp_path / "out", calm.version) == version_digests(tmp_path / "calm", calm.version)
    assert staged(tmp_path / "out") == []
