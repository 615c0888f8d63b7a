"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use at a time, at least one. These are the machine's, or fewer where the process is bound to
    some (taskset, cpusets) or its container has a share of their time (cgroup v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_share(cgroup))))


def _share(cgroup: Path) -> float:
    """How many cores' time the container may take; more than there are where nothing limits it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return 1 << 20
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else 1 << 20
