"""Run a command of the interpreter, and print as JSON its seconds, its processor time, and the bytes that it and its children
handed to the disk, by the kernel's count of blocks written.
"""

import json
import resource
import subprocess
import sys
import time

begin = time.perf_counter()
status = subprocess.run([sys.executable, *sys.argv[1:]], check=False).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
facts = {"seconds": time.perf_counter() - begin, "cpu": used.ru_utime + used.ru_stime, "written": used.ru_oublock * 512}
print(json.dumps(facts))
sys.exit(status)
