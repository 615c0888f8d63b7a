"""Running a command: its options, the Prefect server that this machine is set up for, if any, and the progress that is shown."""

from __future__ import annotations

import base64
import os
import pkgutil
import re
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from flat_tokens.tools import cli
from flat_tokens.tools.cli import existing_place, typed
from flat_tokens.tools.terminal import one_line
from flows.watch.terminal import display

if TYPE_CHECKING:
    from tasks.models import Model


PROGRAM = "flat-tokens-service"


def prefect_server() -> str | None:
    """The URL of the Prefect server that this machine is set up for. None if there is none: then Prefect is not even imported.
    ValueError if one is set up and does not answer or accept us: a run that cannot be watched is hardly intended.
    """
    url, secret, key = map(_setting, ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"))
    if not url:
        return None
    import urllib.error  # only a server needs it
    import urllib.request

    # Where it goes away later, a run waits for it, up to four minutes: as with the deployments, see prefect.yaml.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "7")
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it is not a http URL")
        login = {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"} if secret else {}
        asked = urllib.request.Request(f"{url.rstrip('/')}/version", headers=login)  # noqa: S310  http or https, see above
        with urllib.request.urlopen(asked, timeout=5):  # noqa: S310
            return url
    except (OSError, ValueError) as error:
        status = None
        if isinstance(error, urllib.error.HTTPError):
            status = error.code
            error.close()  # the connection
        if status and (status != 401 or key):
            return url  # it answers; whether it lets us in with a key, Prefect will tell
        remedy = "Set PREFECT_API_AUTH_STRING, as make serve prints it" if status else "Start it, such as by make serve"
        raise ValueError(
            f"the Prefect server at PREFECT_API_URL={url} does not answer ({one_line(error)}). {remedy}, or build without it: "
            "--no-server."
        ) from error


def login_without_prefect() -> str | None:
    """The login that the server wants, NAME:PASSWORD or empty. None if it wants more, which only Prefect can provide."""
    if any(map(_setting, ("PREFECT_API_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS", "PREFECT_API_SSL_CERT_FILE"))):
        return None
    return _setting("PREFECT_API_AUTH_STRING") or ""


def _setting(name: str) -> str | None:
    """A setting of Prefect: of the environment, or else of its active profile, read from its file."""
    if given := os.environ.get(name):
        return given
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    try:
        profiles = tomllib.loads(Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).read_text())
        active = os.environ.get("PREFECT_PROFILE", profiles.get("active"))
        value = profiles.get("profiles", {}).get(active, {}).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return str(value) if value else None


NO_SERVER = "--no-server  do not report to a Prefect server"

STATUS = """\
exit status:
  0  done
  1  begun, and not done: the same command resumes, where there is something to resume
  2  not begun: bad arguments, nothing there, a package missing
"""

EXAMPLES = {
    "build": "dataset.yaml --set tokenizer=gpt2",
    "plan": "dataset.yaml",
    "refresh": "dataset.yaml --keep 3",
    "retokenize": "out/web --tokenizer gpt2 --tokenizer o200k_base --trust-records",
    "status": "out/web",
    "versions": "out/web --json",
    "approve": "out/web --reason 'the new crawl is smaller'",
    "reject": "out/web 4f0c --reason 'half of it is missing'",
    "forget": "out/web --ids ids.txt --reason 'they asked for it'",
    "pin": "out/web 4f0c --note 'the paper'",
    "unpin": "out/web 4f0c",
    "rollback": "out/web",
    "gc": "out/web --keep 3 --days 7 --delete",
    "vocabulary": "cl100k_base --to cl100k_base.tiktoken",
    "train-tokenizer": "dataset.yaml --vocab-size 32768,65536",
    "merge": "out/web out/books out/both",
    "append": "out/more --to out/web",
    "subset": "out/web out/long --min-tokens 500 --fraction 0.1",
    "shuffle": "out/web out/shuffled --seed 1",
    "relayout": "out/web out/small --layout compact",
    "export": "out/web exports/web --to megatron",
    "import": "fineweb/ out/web --format build-nanogpt --end-of-text 50256",
    "publish": "out/web --to hub ORG/NAME --private",
}


def add_command(
    commands: Any, name: str, run: Callable[[Namespace], Any], about: str, listed: str = "", reports: bool = False, **kinds: Any
) -> ArgumentParser:
    """Add a command with its arguments, as `add_listed` takes them. *reports*: it runs a pipeline, which a Prefect server watches
    if there is one.
    """
    example = f"example:\n  {PROGRAM} {name} {EXAMPLES[name]}\n"
    return cli.add_command(commands, name, run, about, example, f"{NO_SERVER if reports else ''}\n{listed}", **kinds)


NOT_OPTIONS = ("operation", "output", "path", "dataset", "repo", "options", "tokenizer", "vocab_sizes")


def add_fields(command: ArgumentParser, model: type[Model], *only: str, **flags: str) -> None:
    """Add an option for each field of a request, or for some *only*: ``--min-tokens`` for ``min_tokens``, unless *flags* has
    another name for it. A place that is read must be there.
    """
    for name in only or [name for name in model.model_fields if name not in NOT_OPTIONS]:
        settings = typed(model, name)
        if "Location" in model.__annotations__[name]:
            settings |= {"type": existing_place, "metavar": "FILE"}
        flag, about = flags.get(name, name).replace("_", "-"), model.descriptions()[name]
        command.add_argument(f"--{flag}", dest=name, help=about[:1].lower() + about[1:], **settings)


def given_fields(options: Namespace, model: type[Model]) -> dict[str, Any]:
    """The fields of a request that the command line has."""
    return {name: value for name in model.model_fields if (value := getattr(options, name, None)) is not None}


T = TypeVar("T")
R = TypeVar("R")


def run_with_progress(
    options: Namespace,
    alone: AbstractContextManager[R],
    pipeline: Callable[[R], T],
    flow: str,
    *arguments: Any,
    **settings: Any,
) -> T:
    """Run a pipeline and show progress. Return its result. It runs on the runner *alone* gives; if a Prefect server is set up,
    as the *flow* of that path with the arguments instead: Prefect is imported for nothing else.
    """
    server = None if options.no_server else prefect_server()
    if server:
        # The server gets every line of the tasks all the same; the terminal is for the display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    name = _name(arguments[0] if arguments else Namespace(**settings))
    has_server = server is not None
    with nullcontext() if options.quiet else display(name, sys.stderr.isatty(), has_server=has_server):
        options.begun = True
        if server is None:
            with alone as runner:
                return pipeline(runner)
        # Prefect sends statistics of use to its makers, and says so above the display; make serve sends none either.
        os.environ.setdefault("DO_NOT_TRACK", "1")
        from prefect import tags  # reads its settings when it is imported
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        from flows.watch.outages import outages
        from flows.watch.words import TAG

        outages()
        # The run sends heartbeats of its own: Prefect's thread would keep it from ending for up to a second.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), tags(TAG):
            result: T = pkgutil.resolve_name(flow)(*arguments, **settings)
            return result


def run_request(options: Namespace, request: Any, pipeline: Callable[[Any, Any], T], flow: str) -> T:
    """Run a pipeline of a request on threads of this process and show progress, as ``run_with_progress`` does."""
    from flows.runners.processes import Threads  # as the pipeline, heavy

    return run_with_progress(options, Threads(request.workers), partial(pipeline, request), flow, request)


def _name(request: Any) -> str:
    """The name of a run: from its configuration or request, else from its output or dataset."""
    place = str(getattr(request, "output", getattr(request, "dataset", request)))
    return getattr(request, "name", None) or PurePath(place.rstrip("/")).name


M = TypeVar("M", bound="Model")


def checked_request(model: type[M], settings: dict[str, Any], option: str = "") -> M:
    """A request from the settings of the command line, or of an *option*. ValueError lists all that is wrong with it."""
    from pydantic import ValidationError  # help needs no models

    from tasks.faults import faults_of

    try:
        return model.model_validate(settings)
    except ValidationError as error:
        faults = (re.sub(r"^operation\.\w+[.: ]*", "", fault) for fault in faults_of(error, model))
        raise ValueError(f"{option}{'; '.join(faults)}") from error
