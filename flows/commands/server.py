"""The Prefect server that this machine is set up for, if any."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flows.commands.display import display, log_progress
from flows.commands.errors import one_line

if TYPE_CHECKING:
    pass


if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def looked_after() -> Iterator[None]:
    """Runs of the block are known to the automations by tag and heartbeat, as those of deployments are."""
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")
    from prefect import tags  # reads its settings when it is imported

    with tags("flat-tokens"):
        yield


def prefect_server() -> str | None:
    """The URL of the Prefect server that this machine is set up for, or None: then nothing of Prefect is even imported.

    ValueError where one is set up and does not answer: a run that nobody can watch is hardly what was meant.
    """
    url = os.environ.get("PREFECT_API_URL") or _profile_setting("PREFECT_API_URL")
    if not url:
        return None
    # Where it goes away later, a run waits for it, up to four minutes: as with the deployments, see prefect.yaml.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "7")
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it is no http URL")
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):  # noqa: S310  http or https, see above
            return url
    except urllib.error.HTTPError:
        return url  # it answers; whether it lets us in, Prefect will tell
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the Prefect server at PREFECT_API_URL={url} does not answer ({one_line(error)}). Start it with "
            "'prefect server start', or build without it: --no-server."
        ) from error


def _profile_setting(name: str) -> str | None:
    """A setting of Prefect's active profile, read from its file."""
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    try:
        profiles = tomllib.loads(Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).read_text())
        active = os.environ.get("PREFECT_PROFILE", profiles.get("active"))
        value = profiles.get("profiles", {}).get(active, {}).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return str(value) if value else None


T = TypeVar("T")


def watched(options: argparse.Namespace, alone: Callable[[], T], with_server: Callable[[], T]) -> T:
    """What one of the two gives, the second one if a Prefect server is set up, its progress shown."""
    server = None if options.no_server else prefect_server()
    if server and not options.quiet:
        # The server gets every line of the tasks all the same; the terminal is for the display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    with log_progress() if options.quiet else display(sys.stderr.isatty()):
        if server is None:
            return alone()
        with looked_after():
            return with_server()
