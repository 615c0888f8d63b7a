"""What every benchmark here prints: one JSON line with times, counts, speed and memory."""

import json
import os
import resource
import time


def seconds_since_process_start() -> float:
    """Wall time since the kernel started this process, to 1/100 s: interpreter start and imports count."""
    with open("/proc/self/stat") as stat:
        # The command name, in parentheses, may hold spaces; the fields count from behind it.
        start_ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def report(name: str, startup_seconds: float, seconds: float, text_bytes: int, documents: int, tokens: int) -> None:
    """Print the JSON line. `seconds` runs from main's first line; `startup_seconds` is what came before it."""
    line = {
        "benchmark": name,
        "seconds": round(seconds, 3),
        "startup_seconds": round(startup_seconds, 3),
        "text_bytes": text_bytes,
        "documents": documents,
        "tokens": tokens,
        "mb_per_s": round(text_bytes / 1e6 / seconds, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "peak_rss_mb_largest_child": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3),
    }
    print(json.dumps(line), flush=True)
