"""The build beside its yardsticks, in one run: the published way, and the floor that no build can go below.

Whole processes are timed from outside, interpreter start and imports included, in turn and several times, each with all
outputs of the others removed. Prints a table of medians and the two ratios that matter.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def timed(command: list[str], output: Path) -> dict[str, Any]:
    """Run a command, with nothing where it writes to: its own last JSON value, and the whole process's seconds."""
    shutil.rmtree(output, ignore_errors=True)
    time.sleep(3)  # for the disk to finish what the last one left to it
    begun = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    shutil.rmtree(output, ignore_errors=True)
    return {**json.loads(printed), "whole": seconds, "peak": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory for the repeated corpus and the outputs")
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "corpus")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="of build and floor; the published way runs --published times")
    parser.add_argument("--published", type=int, default=1)
    parser.add_argument("--tokenizer", default="cl100k_base")
    parser.add_argument("--no-ids", action="store_true", help="documents are known by their text, not by the column 'id'")
    options = parser.parse_args()

    scratch = options.scratch.absolute()
    text, output = scratch / f"text-{options.gigabytes:g}", scratch / "output"
    corpus = [sys.executable, str(HERE / "corpus.py"), "--output", str(text), "--gigabytes", str(options.gigabytes)]
    subprocess.run([*corpus, "--corpus", str(options.corpus.absolute())], cwd=ROOT, check=True)
    source = {"path": f"{text}/*.parquet", **({} if options.no_ids else {"id_column": "id"})}
    config = scratch / "config.yaml"
    config.write_text(json.dumps({"output": str(output), "source": source, "tokenizer": options.tokenizer}))

    peers = {
        name: [
            sys.executable,
            str(HERE / f"{name}.py"),
            "--input",
            str(text),
            "--output",
            str(output),
            "--tokenizer",
            options.tokenizer,
        ]
        for name in ("floor", "published_way")
    }
    build = [sys.executable, "-m", "flows", "build", str(config), "--no-server", "--json"]
    runs: dict[str, list[dict[str, Any]]] = {"build": [], "floor": [], "published_way": []}
    for i in range(options.rounds):
        runs["floor"].append(timed(peers["floor"], output))
        runs["build"].append(timed(build, output))
        if i < options.published:
            runs["published_way"].append(timed(peers["published_way"], output))

    text_bytes = runs["floor"][0]["text_bytes"]
    print(f"{text_bytes / 1e9:.2f} GB of text, {runs['floor'][0]['tokens']:,} tokens of {options.tokenizer}\n")
    print("| | whole process, s (median, min to max) | MB/s of text | peak memory, largest process |\n|---|---:|---:|---:|")
    median = {}
    for name, found in runs.items():
        if not found:
            continue
        seconds = [run["whole"] for run in found]
        median[name] = statistics.median(seconds)
        print(
            f"| {name} | {median[name]:.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {text_bytes / 1e6 / median[name]:.0f} |"
            f" {max(run['peak'] for run in found) / 1e6:.0f} MB |"
        )
    inner = statistics.median(run["seconds"] for run in runs["floor"])
    if options.published:
        print(f"\nbuild / published way: {median['published_way'] / median['build']:.1f} times its throughput")
    print(f"build / floor: {median['floor'] / median['build']:.0%} of its throughput, whole processes")
    print(
        f"build / floor: {inner / median['build']:.0%} with the floor's interpreter start and imports not counted ({inner:.1f} s)"
    )
    stages = {s: statistics.median(run["seconds"][s] for run in runs["build"]) for s in runs["build"][0]["seconds"]}
    print("build's stages: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()))
    outside = median["build"] - stages["tokenize"] - stages["split"]
    print(f"outside the tokenize and split stages: {outside:.2f} s")


if __name__ == "__main__":
    main()
