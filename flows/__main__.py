"""``python -m flows``: the command line."""

import atexit
import gc
import os
import sys
from contextlib import suppress

TUNABLES = "GLIBC_TUNABLES"
C_MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=12582912:glibc.malloc.trim_threshold=268435456"
"""The C library's memory in large pages. A batch's tokens stay with the process, which takes their pages for the next ones: the
system would clear new ones each time, a fifteenth of a build. What has 12 MiB and more goes back when it is dropped.
"""
ARROW_MEMORY = {
    "ARROW_DEFAULT_MEMORY_POOL": "jemalloc",
    "JE_ARROW_MALLOC_CONF": "narenas:1,thp:always,dirty_decay_ms:1000",
}
"""Arrow's memory in one arena for all threads, in large pages: what one thread gives back another one takes. Its usual allocator
holds three times what is in use.
"""
NEW_OBJECTS = 100_000
"""Python looks for cycles after every 700 objects that stay, and importing makes hundreds of thousands: a tenth of its time."""
ABOUT_ONE = 4096
"""Characters that Linux writes about one processor, at most."""
BUILDING = ("build", "refresh", "retokenize")


def run() -> None:
    """Run the command of this process's arguments."""
    if sys.argv[1:2] and sys.argv[1] in BUILDING:
        begin_with_large_pages()
    gc.set_threshold(NEW_OBJECTS)
    from flows.commands.main import main  # takes longer than to begin again

    status = main(sys.argv[1:])
    if not status and "prefect" not in sys.modules:  # its own threads send what is left to say
        end_at_once()
    sys.exit(status)


def begin_with_large_pages() -> None:
    """Begin the process again, once, with memory in large pages if the system has them: engines look up words in hundreds of
    megabytes, and a build takes a fourteenth less of the processors. Nothing else than the environment can tell the C library.
    """
    if sys.platform != "linux":
        return
    for name, value in {**ARROW_MEMORY, **numpy_settings()}.items():
        os.environ.setdefault(name, value)
    if TUNABLES not in os.environ:
        os.environ[TUNABLES] = C_MEMORY
        with suppress(OSError):  # it goes on as it is
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def numpy_settings(cpuinfo: str = "/proc/cpuinfo") -> dict[str, str]:
    """The environment of numpy on this machine, by the file in which Linux describes its processors.

    Its linear algebra starts a thread for every core when it is imported, which takes some 80 ms of the processors, and a build's
    own threads keep them all busy. On AMD's Zen 4 it sorts five times as fast without AVX-512, which has slow stores there.
    """
    processor = ""
    with suppress(OSError), open(cpuinfo, encoding="utf-8") as file:
        processor = file.read(ABOUT_ONE)
    is_zen_4 = all(words in processor for words in ("AuthenticAMD", "family\t: 25", "avx512"))
    return {"OPENBLAS_NUM_THREADS": "1", **({"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"} if is_zen_4 else {})}


def end_at_once() -> None:
    """End the process, which has done all it had to do. The interpreter would first take hundreds of megabytes apart, which the
    system takes back as a whole.
    """
    with suppress(OSError):  # nobody reads any more: the usual way ends with that
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(0)


if __name__ == "__main__":
    run()
