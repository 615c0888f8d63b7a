"""Start the whole service on this machine: a Prefect server with its UI on loopback, workers, deployments, automations. Ctrl-C
stops it. Each dataset gets a deployment that refreshes it, on the schedule if one is given. The others are those of prefect.yaml.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from deployments.arguments import POOLS, arguments
from deployments.server import listen

CHECKOUT = Path(__file__).parents[1]
START_SECONDS = 120.0
WORKER_SECONDS = 30.0
STOP_SECONDS = 30.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The database is one file: a connection that finds it locked waits instead of giving up.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_WORKER_QUERY_SECONDS": "3",
    # Prefect's commands would ask which profile to change, or change one unasked.
    "PREFECT_CLI_PROMPT": "false",
    # A dead run's slot is given back when the run is marked as crashed. If its lease ended before, Prefect would do it twice.
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "3600",
    # A group of slices waits until a worker has done another, which takes minutes: that is no fault.
    "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "900",
    "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
}

TOLD_HERE = "FLAT_TOKENS_OUTAGES_TOLD"
"""Environment variable of the workers and their runs: this process tells of outages of its server (flows/watch/outages.py)."""

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

Process = subprocess.Popen[bytes]


def main() -> int:
    """Start all processes, wait for Ctrl-C or until one of them ends, and stop the others. Return the exit status."""
    parser = arguments(str(__doc__))
    parser.add_argument("--port", type=int, default=4200, help="of the server and its UI (4200)")
    options = parser.parse_args()
    for one in STOPS:
        signal.signal(one, signal.default_int_handler)
    running: dict[str, Process] = {}
    try:
        address = f"http://127.0.0.1:{options.port}"
        secret_file = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser() / "flat-tokens-secret"
        os.environ.update({**SETTINGS, **os.environ, "PREFECT_API_URL": f"{address}/api"})
        os.environ["PREFECT_SERVER_UI_API_URL"] = "/api"  # of whichever name of this machine the browser shows
        os.environ["PREFECT_SERVER_API_AUTH_STRING"] = os.environ["PREFECT_API_AUTH_STRING"] = secret_in(secret_file)
        # Prefect reads its settings when it is imported.
        from deployments.register import register_all, wanted
        from flows.watch.outages import Outages
        from tasks.locations import unbound

        passed = [listening.detach() for listening in listen(options.port)]
        deployments = wanted(options)
        running["server"] = _start(*map(str, (options.port, *passed)), program=("deployments/server.py",), passed=passed)
        for descriptor in passed:  # the server has them now: if it ends, requests fail at once
            os.close(descriptor)
        _wait_for(f"{address}/api/health")
        outages = Outages(f"{address}/api")
        _tell_of_ended_runs("The machine or its server went away. Run it again to go on behind the last stored shard.")
        registered = register_all(deployments, options)
        # Builds wait for their groups, so the groups have a worker of their own.
        for name, pool in POOLS.items():
            started = ("worker", "start", "--pool", pool, "--name", name, "--limit", "8" if name == "builds" else "1")
            running[name] = _start(*started, program=("deployments/worker.py",))
        _wait_for_workers(running)
        known = f'PREFECT_API_URL={address}/api PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(secret_file))})"'
        of_datasets = registered[len(registered) - len(options.datasets) :] or ["none (make serve SERVE=DATASET.yaml)"]
        told = "of failed and crashed runs go to" if options.notify else "off: a failing run shows in the UI alone. Turn them on:"
        print(
            f"\nRun builds at {address}/deployments; Ctrl-C stops everything.\n"
            f"  secret         the page asks for it: {secret_file}\n"
            f"  datasets       {f'{chr(10)}                 '.join(of_datasets)}\n"
            f"  notifications  {told} {options.notify or '--notify TYPE/NAME'}\n"
            f"  access         {unbound() or 'reads and writes of runs are bound to roots'}\n"
            f"  from a shell   {known} {sys.executable} -m flows build ...\n",
            flush=True,
        )
        while not (over := [name for name, process in running.items() if process.poll() is not None]):
            time.sleep(0.5)
            if running["server"].poll() is None:
                outages.is_on()  # tells when it goes, and when it is back
        print(f"The {over[0]} has ended (status {running[over[0]].returncode}): everything is stopped.", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping. What builds have stored is kept; run them again to go on.", flush=True)
        return 0
    finally:
        _stop(running)


def secret_in(path: Path) -> str:
    """The secret, NAME:PASSWORD, that a file holds. Where there is none, it is made, with a random one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as made:
        made.write(f"admin:{secrets.token_urlsafe(32)}\n")
    told, secret = path.stat(), path.read_text().strip()
    if told.st_uid != os.geteuid() or told.st_mode & 0o077 or len(secret) < 16 or not secret.isascii():
        raise ValueError(f"{path}: others may know this secret, or it is no long ASCII text. Remove it, and start again.")
    return secret


def _start(*command: str, program: tuple[str, ...] = ("-m", "prefect"), passed: Collection[int] = ()) -> Process:
    # A session of its own: Ctrl-C reaches this process alone, which stops the others one after the other.
    whole, environment = [sys.executable, *program, *command], {**os.environ, TOLD_HERE: "1"}
    return subprocess.Popen(  # noqa: S603
        whole, cwd=CHECKOUT, env=environment, start_new_session=True, pass_fds=passed, preexec_fn=_stop_with_parent
    )


def _stop_with_parent() -> None:
    """Let Linux stop this process if its parent is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _wait_for(url: str) -> None:
    try:
        urllib.request.urlopen(url, timeout=START_SECONDS).close()  # noqa: S310  on loopback
    except OSError as error:
        raise ValueError(f"The server does not answer at {url} ({error}). What it printed above says why.") from error


def _wait_for_workers(running: dict[str, Process]) -> None:
    """Wait until the workers have begun and said so, or one has ended, for half a minute at most."""
    from prefect.client.orchestration import get_client

    until = time.monotonic() + WORKER_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < until and all(process.poll() is None for process in running.values()):
            if all(client.read_work_pool(name).status == "READY" for name in POOLS.values()):
                return
            time.sleep(0.5)


def _stop(running: dict[str, Process]) -> None:
    """Stop the workers, and with them their runs. Then tell the server of the ended runs, and stop it."""
    for one in STOPS:
        signal.signal(one, signal.SIG_IGN)
    server = running.pop("server", None)
    _end(running.values())
    if server is not None:
        if running and server.poll() is None:
            _tell_of_ended_runs("make serve was stopped. Run it again to go on behind the last stored shard.")
        _end([server])


def _end(processes: Collection[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tell_of_ended_runs(message: str) -> None:
    """Mark runs whose worker has ended as crashed. The server would take minutes to find out."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.states import Crashed

    ours = {"tags": {"all_": ["flat-tokens"]}, "state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    # A run from the command line has no worker; it goes on.
    of_workers = FlowRunFilter.model_validate({**ours, "deployment_id": {"is_null_": False}})
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=of_workers, sort=FlowRunSort.START_TIME_DESC, limit=200):
            if not _is_alive(run.infrastructure_pid):
                client.set_flow_run_state(run.id, Crashed(message=message), force=True)


def _is_alive(pid: str | None) -> bool:
    try:
        os.kill(int(pid or ""), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    sys.exit(main())
