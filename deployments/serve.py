"""Start the whole service on this machine: a Prefect server with its UI on loopback, workers, deployments, automations. Ctrl-C
stops it. Each dataset gets a deployment that refreshes it, on the schedule if one is given. The others are those of prefect.yaml.
A server or worker that ends is started again.
"""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import httpx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from deployments.arguments import POOLS, arguments
from deployments.server import listen
from deployments.supervised import RESTARTS, Process, SupervisedProcess, adopt_orphans, orphans, stop, stop_with_parent
from flows.watch.outages import TOLD_ELSEWHERE, Outages

CHECKOUT = Path(__file__).parents[1]
START_SECONDS = 120.0
WORKER_SECONDS = 30.0
BLOCK_SECONDS = 5.0
"""The server is asked this often for blocks that it did not have at the start."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The database is one file: a connection that finds it locked waits instead of giving up.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    # Prefect's commands would ask which profile to change, or change one unasked.
    "PREFECT_CLI_PROMPT": "false",
    # A dead run's slot is given back when the run is marked as crashed. If its lease ended before, Prefect would do it twice.
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "3600",
    # A group of slices waits until a worker has done another, which takes minutes: that is not a fault.
    "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "900",
    "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
}

AS_BELOW = "(the command needs the two variables of 'from a shell'). It is used as soon as it is there."
AGAIN = "Run it again to resume after the last stored shard."
STARTED_AGAIN = "It is started again, and resumes after the last stored shard."


def main() -> int:
    """Start all processes, and keep them running until Ctrl-C or until one ends again and again. Return the exit status."""
    parser = arguments(str(__doc__))
    parser.add_argument("--port", type=int, default=4200, help="of the server and its UI (4200)")
    options = parser.parse_args()
    for one in STOPS:
        signal.signal(one, signal.default_int_handler)
    adopt_orphans()
    running: dict[str, SupervisedProcess] = {}
    try:
        address = f"http://127.0.0.1:{options.port}"
        os.umask(0o077)  # the database holds secrets and the key to them; this is for all processes that are started
        home = private_home(Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser())
        secret_file = home / "flat-tokens-secret"
        os.environ.update({**SETTINGS, **os.environ, "PREFECT_API_URL": f"{address}/api"})
        os.environ["PREFECT_SERVER_UI_API_URL"] = "/api"  # of whichever name of this machine the browser shows
        os.environ["PREFECT_SERVER_API_AUTH_STRING"] = os.environ["PREFECT_API_AUTH_STRING"] = secret_in(secret_file)
        _say("Reading the configurations")
        # Prefect reads its settings when it is imported.
        from deployments.register import connected, missing_blocks, register_all, wanted

        deployments = wanted(options)
        _say(f"Starting the server, whose database is in {home}")
        running["server"] = SupervisedProcess("server", functools.partial(_start_server, options.port))
        _wait_for(f"{address}/api/health")
        _mark_as_crashed("The machine or its server went away", is_begun_again=True)
        _say("Registering the deployments")
        with connected() as client:
            missing = missing_blocks(client, options)
            notify = None if options.notify in missing else options.notify
            of_datasets = register_all(client, deployments, notify, only=options.only)
        _say("Starting the workers")
        # Builds wait for their groups, so the groups have a worker of their own.
        for name in POOLS:
            limit = "8" if name == "builds" else "1"
            command = ("deployments/worker.py", "worker", "start", "--pool", POOLS[name], "--name", name, "--limit", limit)
            running[name] = SupervisedProcess(f"worker {name!r}", functools.partial(_start, *command))
        _wait_for_workers(running)
        print(_how_to_use_it(address, secret_file, of_datasets, missing, options), flush=True)
        _keep_running(running, Outages(f"{address}/api"), missing, options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping. What builds have stored is kept; run them again to go on.", flush=True)
        return 0
    finally:
        _stop(running)


def _say(what: str) -> None:
    print(f"{what} ...", flush=True)


def _how_to_use_it(address: str, secret_file: Path, of_datasets: list[str], missing: dict[str, str], options: Namespace) -> str:
    """The block of lines that the service prints when it has started."""
    from tasks.locations import unbound

    if options.notify is None:
        notifications = "off: a failing run shows in the UI alone. Turn them on: --notify TYPE/NAME"
    elif options.notify in missing:
        notifications = f"off until there is a block. {missing[options.notify]} {AS_BELOW}"
    else:
        notifications = f"of failed and crashed runs go to {options.notify}"
    lines = {
        "secret": f"the page asks for it: {secret_file}",
        "datasets": f"\n{' ' * 17}".join(of_datasets or ["none (make serve SERVE=DATASET.yaml)"]),
        "notifications": notifications,
        "credentials": f"runs fail until there is a block. {missing[options.credentials]} {AS_BELOW}"
        if options.credentials in missing
        else "",
        "access": unbound() or "reads and writes of runs are bound to roots",
        "from a shell": f'PREFECT_API_URL={address}/api PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(secret_file))})" '
        f"{shlex.quote(sys.executable)} -m flows build ...",
    }
    shown = "".join(f"  {name:14} {text}\n" for name, text in lines.items() if text)
    return f"\nRun builds at {address} under Deployments; Ctrl-C stops everything.\n{shown}"


def _keep_running(
    running: dict[str, SupervisedProcess], outages: Outages, missing: dict[str, str], options: Namespace
) -> NoReturn:
    """Start each process again when it ends, and use missing blocks once people have made them. ValueError if a process ends
    again and again.
    """
    asked = time.monotonic()
    while True:
        if ended := [pid for pid, runs in orphans(running.values()).items() if not runs]:
            _mark_as_crashed("Its worker had ended before it did", pids=ended, is_begun_again=True)
        for name, one in running.items():
            if (how := one.end()) is None:
                continue
            if name in POOLS:  # before the next worker takes runs
                _mark_as_crashed(f"The {one.name} {how}, and this run ended with it", pool=POOLS[name], is_begun_again=True)
            one.start_again()
            print(f"The {one.name} {how}. It was started again.", file=sys.stderr, flush=True)
        if running["server"].end() is None:
            outages.is_on()  # says when it goes, and when it is back
        if missing and time.monotonic() > asked + BLOCK_SECONDS:
            missing, asked = _use_made_blocks(missing, options), time.monotonic()
        time.sleep(0.5)


def _use_made_blocks(missing: dict[str, str], options: Namespace) -> dict[str, str]:
    """Notify by the block of --notify if people have made it by now. Return the blocks that are still missing."""
    from deployments.register import automate, connected, missing_blocks, read_automations

    try:
        with connected() as client:
            still = missing_blocks(client, options)
            if options.notify in missing.keys() - still.keys():
                for automation in read_automations(client, options.notify):
                    automate(client, automation)
    except (ValueError, httpx.HTTPError):  # the server is away for a moment
        return missing
    for named in missing.keys() - still.keys():
        print(f"The block {named} is used from now on.", flush=True)
    return still


def private_home(home: Path) -> Path:
    """The directory of the server's database, which this user alone may enter. ValueError, with the command that closes it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    status, named = home.stat(), shlex.quote(str(home))
    if status.st_uid != os.geteuid():
        remedy = "Set PREFECT_HOME to a directory of your own."
        raise ValueError(f"{home} is another user's, who could read and change the server's database. {remedy}")
    if status.st_mode & 0o077:
        holds = "the server's database is in it, with the blocks' secrets and their key"
        raise ValueError(f"{home} is open to other users, and {holds}. Close it: chmod 700 {named}")
    for database in home.glob("prefect.db*"):
        if stat.S_ISREG(database.lstat().st_mode):
            database.chmod(0o600)
    return home


def secret_in(path: Path) -> str:
    """The secret, NAME:PASSWORD, that a file holds. If there is none, it is made, with a random one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as made:
        made.write(f"admin:{secrets.token_urlsafe(32)}\n")
    status, secret = path.stat(), path.read_text().strip()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(secret) < 16 or not secret.isascii():
        raise ValueError(f"{path}: others may know this secret, or it is not a long ASCII text. Remove it, and start again.")
    return secret


def _start_server(port: int) -> Process:
    passed = [listening.detach() for listening in listen(port)]
    try:
        return _start("deployments/server.py", *map(str, (port, *passed)), passed=passed)
    finally:
        for descriptor in passed:  # the server has them now: if it ends, requests fail at once
            os.close(descriptor)


def _start(*command: str, passed: Collection[int] = ()) -> Process:
    # A session of its own: Ctrl-C reaches this process alone, which stops the others one by one, and reports outages.
    whole, environment = [sys.executable, *command], {**os.environ, TOLD_ELSEWHERE: "1"}
    return subprocess.Popen(  # noqa: S603
        whole, cwd=CHECKOUT, env=environment, start_new_session=True, pass_fds=passed, preexec_fn=stop_with_parent
    )


def _wait_for(url: str) -> None:
    try:
        urllib.request.urlopen(url, timeout=START_SECONDS).close()  # noqa: S310  on loopback
    except OSError as error:
        raise ValueError(f"The server does not answer at {url} ({error}). What it printed above says why.") from error


def _wait_for_workers(running: dict[str, SupervisedProcess]) -> None:
    """Wait until the workers have begun and said so, or one has ended, for half a minute at most."""
    from prefect.client.orchestration import get_client

    until = time.monotonic() + WORKER_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < until and all(one.end() is None for one in running.values()):
            if all(client.read_work_pool(name).status == "READY" for name in POOLS.values()):
                return
            time.sleep(0.5)


def _stop(running: dict[str, SupervisedProcess]) -> None:
    """Stop the workers, and with them their runs. Then tell the server of the ended runs, and stop it."""
    for one in STOPS:
        signal.signal(one, signal.SIG_IGN)
    server = running.pop("server", None)
    stop(running.values(), keep=[server] if server else ())
    if server is not None:
        if running and server.end() is None:
            _mark_as_crashed("make serve was stopped")
        stop([server])


def _mark_as_crashed(
    why: str, *, pool: str | None = None, pids: Collection[int] | None = None, is_begun_again: bool = False
) -> None:
    """Mark runs as crashed whose process has ended, or is one of *pids*. The server would take minutes to find out.

    *pool*: only runs of this one. *is_begun_again*: builds and refreshes are scheduled again, RESTARTS times at most, which begin
    their groups again.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.states import AwaitingRetry, Crashed

    ours = {"tags": {"all_": ["flat-tokens"]}, "state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    # A run from the command line has no worker; it goes on.
    of_workers = FlowRunFilter.model_validate({**ours, "deployment_id": {"is_null_": False}})
    try:
        with get_client(sync_client=True) as client:
            for run in client.read_flow_runs(flow_run_filter=of_workers, sort=FlowRunSort.START_TIME_DESC, limit=200):
                pid = int(text) if (text := run.infrastructure_pid or "").isdecimal() else None  # None before it has one
                is_over = not _is_alive(pid) if pids is None else pid in pids
                if not is_over or pool not in (None, run.work_pool_name):
                    continue
                again = is_begun_again and run.work_pool_name == POOLS["builds"] and run.run_count <= RESTARTS
                client.set_flow_run_state(run.id, Crashed(message=f"{why}. {STARTED_AGAIN if again else AGAIN}"), force=True)
                if again:
                    client.set_flow_run_state(run.id, AwaitingRetry(message=f"{why}. {STARTED_AGAIN}"), force=True)
    except httpx.HTTPError as error:
        print(f"Runs that have ended could not be marked ({error}). The server marks them within five minutes.", file=sys.stderr)


def _is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


if __name__ == "__main__":
    sys.exit(main())
