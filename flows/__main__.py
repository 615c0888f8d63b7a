"""``python -m flows``: the command line."""

import contextlib
import os
import sys

TUNABLES = "GLIBC_TUNABLES"
LARGE_PAGES = "glibc.malloc.hugetlb=1"
BUILDING = ("build", "refresh", "retokenize")


def run() -> None:
    """Run the command of this process's arguments."""
    if sys.argv[1:2] and sys.argv[1] in BUILDING:
        begin_with_large_pages()
    from flows.commands.main import main  # takes longer than to begin anew

    sys.exit(main(sys.argv[1:]))


def begin_with_large_pages() -> None:
    """Begin the process anew, once, with memory in large pages where the system has them: engines look up words in hundreds of
    megabytes, and a build takes a fourteenth less of the processors. Nothing else than the environment can tell the C library.
    """
    if sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = LARGE_PAGES
        with contextlib.suppress(OSError):  # it goes on as it is
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


if __name__ == "__main__":
    run()
