"""Run a command of the interpreter, and print as JSON its seconds, its processor time, and the bytes that it and its children
wrote to the disk: those that the kernel took for it, without those of files that were removed before the disk had them.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

begin = time.perf_counter()
status = subprocess.run([sys.executable, *sys.argv[1:]], check=False).returncode
seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
# The kernel adds the counts of children that have been waited for to their parent's.
counts = {name: int(count) for name, count in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())}
written = counts["write_bytes"] - counts["cancelled_write_bytes"]
print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "written": written}))
sys.exit(status)
