"""The real job under kill -9: the corpus with cl100k_base."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flat_tokens

ROOT = Path(__file__).parents[2]
KILLS = 20


@pytest.mark.slow
def test_corpus_has_the_same_bytes_after_20_kills_and_no_shard_is_made_twice(
    tmp_path: Path, corpus: Path, vocabularies: Path
) -> None:
    """Slices are small, and a run is killed a moment after it has put away one more shard. One that was over before it could be
    killed counts for none: then another one begins from nothing.
    """
    settings = {"source": {"path": str(corpus), "id_column": "id"}, "tokenizer": "cl100k_base", "slice_bytes": 4_000_000}

    def command(name: str) -> list[str]:
        config = tmp_path / f"{name}.yaml"
        config.write_text(json.dumps({"output": str(tmp_path / name), **settings}))
        return [sys.executable, "-m", "flows", "build", str(config), "--no-server", "--json"]

    def finish(name: str) -> Path:
        done = subprocess.run(command(name), cwd=ROOT, capture_output=True, text=True, check=True)
        return Path(json.loads(done.stdout)["path"])

    calm = finish("calm")
    chance = random.Random(20)
    receipts: dict[Path, int] = {}
    deaths, latest = 0, 0.1

    def made() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "killed" / "_cache").glob("*/receipt.json")}

    while deaths < KILLS:
        process = subprocess.Popen(command("killed"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(made()) <= len(receipts) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, latest))
        process.kill()
        status = process.wait()
        assert status in (0, -signal.SIGKILL)
        now = made()
        assert {path: now.get(path) for path in receipts} == receipts
        receipts = now
        deaths += status != 0
        if status == 0:
            assert flat_tokens.verify(tmp_path / "killed", "full").seq_count == 46_132
            shutil.rmtree(tmp_path / "killed")
            receipts, latest = {}, latest / 2
    killed = finish("killed")
    assert (killed / "manifest.json").read_bytes() == (calm / "manifest.json").read_bytes()
    assert flat_tokens.verify(tmp_path / "killed", "full").seq_count == 46_132
    assert not (tmp_path / "killed" / "_staging").exists()
