"""Running a command: its options, the Prefect server that this machine is set up for, if any, and the progress that is shown."""

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
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.tools.terminal import one_line
from flows.watch.terminal import display, log_progress
from tasks.faults import faults_of


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


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    """Add a command with the option that all have."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    command.set_defaults(run=run, quiet=False)
    command.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    return command


def add_running(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    """Add a command that runs a pipeline, with or without a server."""
    command = add_command(commands, name, run, about)
    command.add_argument("--quiet", action="store_true", help="log lines instead of a live display")
    command.add_argument("--no-server", action="store_true", help="do not report to a Prefect server")
    return command


def add_on_request(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    """Add a command that runs a pipeline on a request, which has no configuration file."""
    command = add_running(commands, name, run, about)
    command.add_argument("--workers", type=int, metavar="N", help="tasks at a time (default: one for each core)")
    return command


def add_publishing(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    """Add a command whose request publishes a version; ``publishing`` reads these options."""
    command = add_on_request(commands, name, run, about)
    command.add_argument("--name", metavar="NAME", help="a name for people (default: the first input's)")
    command.add_argument("--scratch", metavar="DIR", help="local directory for staging, where the output is remote")
    command.add_argument("--verify-level", choices=("quick", "full"), default="quick", help="check before publication")
    return command


def add_layout(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("--layout", choices=LAYOUTS, help=f"how the version is stored (default: {default})")


T = TypeVar("T")


def watched(options: argparse.Namespace, alone: Callable[[], T], with_server: Callable[[], T]) -> T:
    """Run one of two functions, the second one if a Prefect server is set up, and show progress. Return its result."""
    server = None if options.no_server else prefect_server()
    if server and not options.quiet:
        # The server gets every line of the tasks all the same; the terminal is for the display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    with log_progress() if options.quiet else display(sys.stderr.isatty()):
        if server is None:
            return alone()
        with looked_after():
            return with_server()


M = TypeVar("M", bound=BaseModel)


def publishing(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("name", "scratch", "verify_level", "workers")}


def checked(model: type[M], **settings: Any) -> M:
    """A request from the settings of the command line. ValueError lists all that is wrong with it."""
    try:
        return model(**settings)
    except ValidationError as error:
        faults = faults_of(error, model)
        operation = (settings.get("operation") or {}).get("operation")
        raise ValueError("; ".join(fault.removeprefix(f"operation.{operation}").lstrip(".: ") for fault in faults)) from error
