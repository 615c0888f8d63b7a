"""One way to open: `make check` fails where code opens a local file otherwise than through flat_tokens/stores/reading.py.

A file that a path names is opened by `open_plain`, `descriptor`, `opened` or `Store`, or by a library at a `library_path`:
each refuses what is outside of the roots. PERMITTED has the functions that open something else, each with its reason.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("flat_tokens", "tasks", "flows", "deployments")
OPENERS = {
    *("open", "io.open", "io.FileIO", "io.open_code", "os.open", "os.fdopen", "codecs.open", "fsspec.open", "fsspec.open_files"),
    *("np.load", "np.loadtxt", "np.genfromtxt", "np.fromfile", "np.memmap", "numpy.load", "numpy.fromfile", "numpy.memmap"),
    *("gzip.open", "bz2.open", "lzma.open", "zipfile.ZipFile", "tarfile.open", "shutil.copy", "shutil.copy2", "shutil.copyfile"),
    *("shutil.copytree", "shutil.copyfileobj", "runpy.run_path", "sqlite3.connect", "linecache.getline", "tokenize.open"),
    "open_in_pieces",
}
"""Functions that open a path."""
METHODS = {
    "read_text",
    "read_bytes",
    "OSFile",
    "memory_map",
    "open_input_file",
    "input_stream",
    "from_file",
    "ParquetFile",
    "read_table",
    "tofile",
}
"""Methods and functions of libraries that do, on whatever they are called."""
READERS = {"self", "store", "file", "text", "source", "chosen", "flat_tokens", "Ledger", "webbrowser"}
"""Names whose own `open` is a door, or opens no path."""
DOOR = "flat_tokens/stores/reading.py"

OWN = "a file that this process has made in its own directory"
LOCK = "a lock: nothing is read from it"
SYSTEM = "a file of the system"
OURS = "a file of the checkout or the package"
OPERATOR = "a file that the operator names, not a run"
HERE = "what the library opens is at a library_path, or open already"
PERMITTED = {
    "deployments/demo/read_back.py:": "a program for people to read",
    "deployments/register.py:read_automations": OURS,
    "deployments/register.py:read_deployments": OURS,
    "deployments/serve.py:secret_in": OPERATOR,
    "deployments/supervised.py:orphans": SYSTEM,
    "flat_tokens/columns.py:_opened": HERE,
    "flat_tokens/rows/packing_index.py:load": HERE,
    "flat_tokens/vocabulary.py:_data": "a file of an installed package, of a digest that is known",
    "flat_tokens/formats/parquet.py:_source": HERE,
    "flat_tokens/formats/parquet.py:parts": HERE,
    "flat_tokens/pages.py:open_in_pieces": HERE,
    "flat_tokens/pages.py:sound_metadata": HERE,
    "flat_tokens/steps/language.py:__init__": "a file of an installed package",
    "flat_tokens/stores/disk_cache.py:_boot": SYSTEM,
    "flat_tokens/record/croissant.py:croissant": OURS,
    "flat_tokens/record/forms.py:filled_forms": OURS,
    "flat_tokens/stores/disk_cache.py:add": OWN,
    "flat_tokens/stores/disk_cache.py:find": "the reader's own cache, of which each unit has a checksum",
    "flat_tokens/stores/local.py:_open": "writes a new file; refuse_links has looked at its directories",
    "flat_tokens/stores/local.py:directory_below": "a directory, reached through no link",
    "flat_tokens/stores/local.py:locked": LOCK,
    "flat_tokens/stores/local.py:sync": "reads nothing",
    "flat_tokens/stores/signing.py:public_key_in": OPERATOR,
    "flat_tokens/stores/signing.py:_text_in": OPERATOR,
    "flat_tokens/stores/store.py:open": "an object of a remote store",
    "flat_tokens/stores/store.py:upload": OWN,
    "flat_tokens/text/arrow.py:_source": HERE,
    "flat_tokens/text/parquet.py:_opened": HERE,
    "flat_tokens/text/rows.py:open": "a file of a remote store",
    "flat_tokens/tools/cli.py:main": SYSTEM,
    "flat_tokens/tools/diff.py:on_disk": OWN,
    "flows/__main__.py:numpy_settings": SYSTEM,
    "flows/commands/build.py:read_config": OPERATOR,
    "flows/commands/running.py:_setting": OPERATOR,
    "tasks/assemble/duplicates.py:_mapped": OWN,
    "tasks/config.py:_share": SYSTEM,
    "tasks/config.py:available_memory": SYSTEM,
    "tasks/derive/choice.py:_listed": OWN,
    "tasks/derive/choice.py:count_unfound": OWN,
    "tasks/derive/inputs.py:read_keys": "bytes in memory",
    "tasks/download/delta.py:rows_of": HERE,
    "tasks/download/fetch.py:_bring": OWN,
    "tasks/download/fetch.py:count_more": OWN,
    "tasks/download/fetch.py:_taken_in": OWN,
    "tasks/download/outlines.py:fetch_spans": OWN,
    "tasks/download/outlines.py:outlined": OWN,
    "tasks/download/hub.py:_write_parquet": OWN,
    "tasks/download/iceberg.py:open": "Store's own open, which is a door",
    "tasks/output/leases.py:_locked": LOCK,
    "tasks/output/leases.py:_processes": SYSTEM,
    "tasks/output/leases.py:write": OWN,
    "tasks/parts/input.py:_read": OWN,
    "tasks/parts/input.py:documents_taken": OWN,
    "tasks/parts/input.py:_renamed": OWN,
    "tasks/tokenize/engines.py:resident_bytes": SYSTEM,
    "tasks/tokenize/rendering/process.py:main": "its standard input",
    "tasks/tokenize/tokenizers.py:_path_of": OWN,
}
"""The functions that open something else, and why they may."""


def opening(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int, str]]:
    """Calls that open a path: the function that they are in, the line and what is called."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not function else function
        if isinstance(node, ast.Call) and (called := _opener(node)):
            yield inner, node.lineno, called
        yield from opening(node, inner)


def _opener(call: ast.Call) -> str:
    """The name by which a call opens a path; empty for another call."""
    called, name = ast.unparse(call.func), ast.unparse(call.func).rpartition(".")[2]
    if called in OPENERS or (name in METHODS and called != name):
        return called
    if name == "open" and called.rpartition(".")[0].rpartition(".")[2] not in READERS:
        return called
    return ""


def faults(root: Path = ROOT) -> Iterator[str]:
    """A sentence for each call that opens a path elsewhere, and for each permission that nothing uses."""
    used = set()
    for path in sorted(path for floor in FLOORS for path in (root / floor).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name == DOOR:
            continue
        for function, line, called in opening(ast.parse(path.read_text("utf-8"))):
            within = f"{name}:{function}"
            used.add(within)
            if within not in PERMITTED:
                yield f"{name}, line {line}: {called} opens a path. Use open_plain of {DOOR}, or say in tests/doors.py why not."
    yield from (f"{within} opens no path: remove it from PERMITTED." for within in sorted(set(PERMITTED) - used))


if __name__ == "__main__":
    found = list(faults())
    print("\n".join(found) or "opening: one way")
    sys.exit(1 if found else 0)
