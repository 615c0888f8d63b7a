"""Run the fuzzers, or the inputs that they have kept."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tests.fuzz.driver import CORPUS, fuzz, replay
from tests.fuzz.mutated_datasets import DATASETS, table
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60, help="of each target (default: 60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the mutations (default: by the clock)")
    parser.add_argument("--keep", type=Path, default=CORPUS, metavar="DIR", help="where inputs with faults are kept")
    parser.add_argument("--replay", action="store_true", help="run the corpus instead, and print a JSON line for each input")
    parser.add_argument("--runs", type=int, default=1 << 60, help="of each target, at most")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its directory goes
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {sorted(unknown)[0]!r}; there are {', '.join(TARGETS)}")
    chosen = options.targets or TARGETS
    if options.replay:
        for name in chosen:
            for path, fault in replay(name, TARGETS[name], options.keep).items():
                print(json.dumps([path.relative_to(options.keep).as_posix(), *(fault or (None, None))]), flush=True)
        return 0
    print(f"seed {options.seed}", flush=True)
    found = [fuzz(name, TARGETS[name], options.seconds, options.seed, options.keep, options.runs) for name in chosen]
    print("\n| target | runs | seconds | faults |\n|---|---:|---:|---|")
    for outcome in found:
        told = ", ".join(f"{signature} ({count})" for signature, count in sorted(outcome.faults.items()))
        print(f"| {outcome.target} | {outcome.runs:,} | {outcome.seconds:.0f} | {told or 'none'} |")
    if datasets := [outcome for outcome in found if outcome.target in DATASETS]:
        print(f"\n{table(datasets)}")
    faults = sum(len(outcome.faults) for outcome in found)
    print(f"\n{sum(outcome.runs for outcome in found):,} runs; {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
