"""Terminated, a build goes on where it was."""

import json
import subprocess
import time

import pytest

from tests.faults.support import (
    build_here,
    command,
    receipts,
    settings_of,
    staged,
    version_digests,
)
from tests.processes import ROOT, until

DEMO = ROOT / "deployments/demo"


@pytest.mark.slow
def test_terminated_build_ends_and_goes_on(tmp_path):
    """Exit status 143 and one line that says what to do, whenever the signal comes."""
    settings = settings_of(tmp_path / "out", DEMO / "stories.parquet", DEMO / "notes.jsonl", slice_bytes=8000)
    version = build_here(settings).version  # in about a second, of 26 slices
    expected = version_digests(tmp_path / "out", version)
    for turn in range(5):
        root = tmp_path / str(turn)
        config = tmp_path / f"{turn}.yaml"
        config.write_text(json.dumps({**settings, "output": str(root)}))
        with subprocess.Popen(command(config), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: root.exists() or process.poll() is not None, "the build does not begin to write")  # noqa: B023
            time.sleep(0.07 * turn)
            process.terminate()
            _, errors = process.communicate(timeout=120)
        assert process.returncode == 143 or (turn and not process.returncode), errors  # 0: the build was faster
        if process.returncode:
            assert errors.splitlines() == ["terminated: run the same command again to resume after the last stored shard"]
        finished = receipts(root)
        result = build_here({**settings, "output": str(root)})
        assert result.was_published or result.slices_reused == len(finished)
        assert version_digests(root, version) == expected
        assert staged(root) == []
