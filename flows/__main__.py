"""``python -m flows``: the command line."""

import sys

from flows.commands.main import main


def run() -> None:
    """Run the command of this process's arguments."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
