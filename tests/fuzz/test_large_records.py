"""Records of any size at an output: none is read that does not fit into memory."""

from tests.processes import python

WITHIN = """
import resource, sys
from pathlib import Path
from flat_tokens.stores.store import Store
{imports}
root = Path(sys.argv[1])
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30),) * 2)
for name, read in {records}:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(2 << 30)  # a hole
    try:
        read()
    except ValueError as error:
        assert "is larger than" in str(error) and str(root) in str(error), error
    path.unlink(missing_ok=True)  # a receipt is moved aside
"""
UNLIMITED = [
    ("manifest.json", "from flat_tokens.manifest import read_manifest", "read_manifest(Store.at(root))"),
    ("latest.json", "from tasks.output.pointer import read_pointer", "read_pointer(Store.at(root))"),
    ("_groups/0/group.json", "from tasks.groups import read_group", "read_group(Store.at(root), '0')"),
    ("_cache/0/receipt.json", "from tasks.shards.receipts import load_shard", "load_shard(Store.at(root), '0')"),
    ("origins/0.json", "from tasks.output.versions import read_origin", "read_origin(Store.at(root), '0')"),
]


def test_records_of_gigabytes_are_not_read(tmp_path):
    """In a process that may have one gigabyte."""
    records = ", ".join(f"({name!r}, lambda: {call})" for name, _, call in UNLIMITED)
    code = WITHIN.format(imports="\n".join(imports for _, imports, _ in UNLIMITED), records=f"[{records}]")
    done = python("-c", code, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
