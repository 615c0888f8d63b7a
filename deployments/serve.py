"""Start the whole service on this machine: a Prefect server with its UI on loopback, workers, deployments, automations. Ctrl-C
stops it.

``serve.py [DATASET.yaml ...] [--cron "0 3 * * *" | --every SECONDS] [--timezone UTC] [--keep N] [--notify TYPE/NAME]
[--credentials secret/NAME] [--port 4200]``: each dataset gets a deployment that refreshes it, on the schedule if one is given.
The other deployments are those of prefect.yaml.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path
from types import FrameType

CHECKOUT = Path(__file__).parents[1]
SERVER = str(CHECKOUT / "deployments" / "server.py")
START_SECONDS = 120.0
STOP_SECONDS = 30.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The database is one file: a connection that finds it locked waits instead of giving up.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_WORKER_QUERY_SECONDS": "3",
}

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

Process = subprocess.Popen[bytes]


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments of this program and of register.py: the deployments to register."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", type=Path, metavar="DATASET.yaml", help="refreshed by a deployment of its own")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--cron", help="when; without it, only when asked to in the UI or by 'prefect deployment run'")
    when.add_argument("--every", type=_positive, metavar="SECONDS", help="how often, instead of --cron")
    parser.add_argument("--timezone", default="UTC", help="of --cron, such as Europe/Paris (UTC)")
    parser.add_argument("--keep", type=_positive, metavar="N", help="versions of each dataset that are kept (all)")
    parser.add_argument("--credentials", metavar="secret/NAME", help="a block with credentials of stores (flows/credentials.py)")
    parser.add_argument("--notify", metavar="TYPE/NAME", help="a notification block, such as slack-webhook/alerts")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def main() -> int:
    """Start all processes, wait for Ctrl-C or until one of them ends, and stop the others. Return the exit status."""
    parser = arguments(str(__doc__))
    parser.add_argument("--port", type=int, default=4200, help="of the server and its UI (4200)")
    options = parser.parse_args()
    port = options.port
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ["PREFECT_API_URL"] = os.environ["PREFECT_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    for one in STOPS:
        signal.signal(one, _interrupt)
    running: dict[str, Process] = {}
    try:
        # Prefect reads its settings when it is imported.
        from register import register_all, wanted

        _refuse_taken(port)
        deployments = wanted(options)
        running["server"] = _start("server", "start", "--host", "127.0.0.1", "--port", str(port), program=(SERVER,))
        _wait_for(f"http://127.0.0.1:{port}/api/health", running["server"])
        _tell_of_ended_runs("The machine or its server went away. Run it again to go on behind the last stored shard.")
        register_all(deployments, options)
        # Builds wait for their groups, so the groups have a worker of their own.
        running["builds"] = _start("worker", "start", "--pool", "flat-tokens", "--name", "builds", "--limit", "8")
        running["groups"] = _start("worker", "start", "--pool", "flat-tokens-groups", "--name", "groups", "--limit", "1")
        print(f"\nRun builds at http://127.0.0.1:{port}/deployments; Ctrl-C stops everything.\n", flush=True)
        while (ended := _ended(running)) is None:
            time.sleep(0.5)
        print(f"The {ended} has ended (status {running[ended].returncode}): everything is stopped.", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping. What builds have stored is kept; run them again to go on.", flush=True)
        return 0
    finally:
        _stop(running)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _refuse_taken(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ValueError(f"There is no port {port}.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"Port {port} cannot be had ({error.strerror}). Stop what listens there, or choose another: --port."
            ) from error


def _start(*command: str, program: tuple[str, ...] = ("-m", "prefect")) -> Process:
    # A session of its own: Ctrl-C reaches this process alone, which stops the others one after the other.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *program, *command], cwd=CHECKOUT, start_new_session=True, preexec_fn=_stop_with_parent
    )


def _stop_with_parent() -> None:
    """Let Linux stop this process if its parent is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _wait_for(url: str, server: Process) -> None:
    until = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310  on loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise ValueError(f"The server does not answer at {url}. What it printed above says why.")


def _ended(running: dict[str, Process]) -> str | None:
    return next((name for name, process in running.items() if process.poll() is not None), None)


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
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.states import Crashed, StateType

    under_way = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    ours = FlowRunFilter(
        tags=FlowRunFilterTags(all_=["flat-tokens"]),
        state=FlowRunFilterState(type=under_way),
        # A run from the command line has no worker; it goes on.
        deployment_id=FlowRunFilterDeploymentId(is_null_=False),
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=ours, sort=FlowRunSort.START_TIME_DESC, limit=200):
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
