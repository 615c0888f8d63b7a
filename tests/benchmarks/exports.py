"""Exports to every format, beside the disk's own speed, in one run.

    python tests/benchmarks/exports.py --scratch $BENCH --dataset DATASET [--formats megatron mds ...]

Each export is a whole process of its own; megabytes a second are of output. Prints a Markdown table.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flat_tokens.formats import FORMATS  # noqa: E402
from flat_tokens.stores.store import Store  # noqa: E402

NARROW = {"nanogpt", "build-nanogpt", "llm.c"}
"""Formats of 16 bits: a dataset with larger ids is refused there."""
END_OF_TEXT = {"modalities", "nanogpt", "build-nanogpt", "jaxformer", "llm.c", "llm.c-llama-3", "datatrove"}
EXPORT = """
import re, sys
from flat_tokens.tools.cli import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], re.search(r"RssFile:\\s+(\\d+)",
      open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(status)
"""


def disk(scratch: Path, megabytes: int = 1000) -> float:
    """Seconds a MB to write random bytes as exports write theirs, synced."""
    block = os.urandom(4 << 20)
    begin = time.perf_counter()
    with Store.at(scratch).create("disk.bin") as writer:
        for _ in range(megabytes // 4):
            writer.write(block)
    seconds = time.perf_counter() - begin
    (scratch / "disk.bin").unlink()
    return (megabytes << 20) / 1e6 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--narrow", help="a dataset whose ids fit 16 bits, for the formats that hold no others")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    print(f"disk: {max(disk(args.scratch) for _ in range(3)):.0f} MB/s\n")
    print("| format | MB of output | s | MB/s | peak memory MB |\n|---|---:|---:|---:|---:|")
    for name in args.formats:
        source = args.narrow if name in NARROW else args.dataset
        if source is None:
            continue
        command = ["export", source, str(args.scratch / "out"), "--to", name]
        if name in END_OF_TEXT:
            command += ["--end-of-text", "50256" if name in NARROW else "100257"]
        best = (float("inf"), 0, 0.0)
        for _ in range(args.rounds):
            shutil.rmtree(args.scratch / "out", ignore_errors=True)
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", EXPORT, *command],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - begin
            if done.returncode:
                sys.exit(f"{name}: {done.stderr}")
            peak = int(re.findall(r"\d+", done.stderr.splitlines()[-1])[0]) / 1e3
            size = sum(path.stat().st_size for path in (args.scratch / "out").rglob("*") if path.is_file())
            best = min(best, (seconds, size, peak))
        seconds, size, peak = best
        print(f"| {name} | {size / 1e6:.0f} | {seconds:.2f} | {size / 1e6 / seconds:.0f} | {peak:.0f} |", flush=True)
    shutil.rmtree(args.scratch / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
