"""Records of any size at an output: none is read that does not fit into memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHIN = """
import resource, sys
from pathlib import Path
{imports}
path, root = Path(sys.argv[1]), Path(sys.argv[2])
path.parent.mkdir(parents=True, exist_ok=True)
with path.open("wb") as file:
    file.truncate(2 << 30)  # a hole
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30),) * 2)
try:
    {call}
except ValueError as error:
    assert "is larger than" in str(error) and str(root) in str(error), error
"""
UNLIMITED = {
    "manifest": ("manifest.json", "from flat_tokens.manifest import read_manifest", "read_manifest(Store.at(root))"),
    "pointer": ("latest.json", "from tasks.output.pointer import read_pointer", "read_pointer(Store.at(root))"),
    "group": ("_groups/0/group.json", "from tasks.groups import read_group", "read_group(Store.at(root), '0')"),
    "receipt": ("_cache/0/receipt.json", "from tasks.shards.receipts import load_shard", "load_shard(Store.at(root), '0')"),
    "pin": ("pins/0.json", "from tasks.output.versions import pin_note", "pin_note(Store.at(root), '0')"),
    "origin": ("origins/0.json", "from tasks.output.versions import read_origin", "read_origin(Store.at(root), '0')"),
}


@pytest.mark.parametrize("record", UNLIMITED)
def test_a_record_of_gigabytes_is_not_read(tmp_path: Path, record: str) -> None:
    """In a process that may have one gigabyte."""
    name, imports, call = UNLIMITED[record]
    code = WITHIN.format(imports=f"from flat_tokens.stores.store import Store\n{imports}", call=call)
    command = [sys.executable, "-c", code, str(tmp_path / "out" / name), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
