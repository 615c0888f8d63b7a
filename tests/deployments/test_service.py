"""``make serve`` for real: one command, a server, workers, deployments, automations; what people see of it in the API."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
import requests
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from websockets import Subprotocol
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from deployments.register import automate, create_pools, read_automations, read_deployments, register
from tests.deployments.service import CHECKOUT, Service, end, environment, start, worker
from tests.processes import family, free_port, kill, python, serving, until
from tests.sources import held

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXTS = {
    "a.jsonl": [("a1", "apples"), ("a2", "apricots"), ("a3", "almonds"), ("a4", "artichokes")],
    "b.jsonl": [("b1", "bananas"), ("b2", "berries"), ("b3", "beets")],
    "c.jsonl": [("c1", "cherries"), ("c2", "carrots")],
}


def put(directory: Path, name: str, documents: list[tuple[str, str]]) -> None:
    """A file that is there whole or not at all."""
    whole = directory / f".{name}"
    whole.write_text("".join(json.dumps({"id": identity, "text": text}) + "\n" for identity, text in documents))
    whole.rename(directory / name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("service")
    (home / "texts").mkdir()
    for name, documents in TEXTS.items():
        put(home / "texts", name, documents)
    (home / "fruit.yaml").write_text(
        f"name: fruit\noutput: {home}/out\nsource: {{name: basket, path: {home}/texts, id_column: id}}\n"
        "tokenizer: bytes\nvalidation_fraction: 0.4\n"
    )
    return home


@pytest.fixture(scope="module")
def launched() -> Iterator[list[Service]]:
    """Those that were started, one after the other."""
    started = []
    yield started
    for one in started:
        end(one)


@pytest.fixture
def service(launched: list[Service], home: Path) -> Service:
    """Everything on this machine, and a refresh of a directory every ten seconds, paused: other tests need the processor. Started
    again after the test that stops it.
    """
    if not launched or launched[-1].process.poll() is not None:
        port = launched[-1].port if launched else free_port()
        launched.append(start(home, port, str(home / "fruit.yaml"), "--every", "10"))
        launched[-1].switch(False)
    return launched[-1]


def first_refresh(service: Service) -> dict[str, Any] | None:
    """The first run that has ended well. Others may have been due while it ran: they are cancelled."""
    runs = service.runs("dataset:fruit", "tokenizer:bytes")
    return next((run for run in runs if run["state_type"] == "COMPLETED"), None)


@pytest.fixture
def refreshed(service: Service) -> dict[str, Any]:
    """The run that made the first version of the directory."""
    if not (run := first_refresh(service)):
        service.switch(True)
        run = until(lambda: first_refresh(service), "the first refresh")
        service.switch(False)
    return run


def reaching(service: Service) -> AbstractContextManager[Any]:
    """Prefect's clients in this process reach the service."""
    return temporary_settings({PREFECT_API_URL: service.url, PREFECT_API_AUTH_STRING: service.secret})


def config_of(home: Path, name: str, path: Path, **of_source: str) -> dict[str, Any]:
    """A configuration as the form of a run sends it."""
    source = {"path": str(path), **of_source}
    return {"name": name, "output": f"{home}/{name}", "sources": [source], "tokenizer": {"name": "bytes"}}


def config_of_lines(home: Path, name: str, count: int) -> dict[str, Any]:
    """A build that takes some time: of *count* lines."""
    path = home / f"{name}.txt"
    path.write_text("".join(f"line {number} of a text that takes some time\n" for number in range(count)))
    return {**config_of(home, name, path, document_separator="\n"), "slice_bytes": 100_000, "workers": 1}


def said_by(program: str, *arguments: str, of: Service) -> subprocess.CompletedProcess[str]:
    """A program of ``deployments`` has run, with the settings of the service's clients."""
    return python(f"deployments/{program}.py", *arguments, env=of.environment)


def latest(out: Path) -> Path | None:
    pointer = out / "latest.json"
    return out / "versions" / json.loads(pointer.read_text())["version"] if pointer.exists() else None


@pytest.mark.usefixtures("refreshed")
def test_a_scheduled_refresh_publishes_what_is_new(service, home):
    """A directory gains and loses a file between two runs of a schedule."""
    out, texts = home / "out", home / "texts"
    service.switch(True)
    put(texts, "d.jsonl", [("d1", "dates"), ("d2", "dill")])
    (texts / "c.jsonl").unlink()
    expected = {text for name in ("a.jsonl", "b.jsonl") for _, text in TEXTS[name]} | {"dates", "dill"}
    until(lambda: {one.text for docs in held(latest(out)).values() for one in docs} == expected, "the refresh after the change")

    def headlines() -> list[str]:
        runs = [run for run in service.runs("dataset:fruit", "auto-scheduled") if run["state_type"] == "COMPLETED"]
        return [service.artifacts(run["id"])["fruit-refresh"]["description"] for run in runs]

    assert until(lambda: [line for line in headlines() if line.startswith("nothing changed")], "a refresh without changes")
    service.switch(False)


def test_a_run_can_be_watched(service, refreshed):
    """Its name, tags, log lines, progress of every stage, summary, and the dataset as an asset of its sources."""
    run = refreshed
    assert run["name"] == "refresh fruit with bytes"

    artifacts = service.artifacts(run["id"])
    kinds = {f"fruit-{stage}": "progress" for stage in ("download", "tokenize", "split")}
    kinds |= dict.fromkeys(("fruit-summary", "fruit-refresh", "fruit-refreshes", "dataset-fruit"), "markdown")
    assert {key: one["type"] for key, one in artifacts.items()} == kinds
    assert artifacts["fruit-tokenize"]["description"].startswith("Done: 9 documents, ")
    assert "- basket: 9 documents read, 9 written, none skipped; " in artifacts["fruit-summary"]["data"]

    def logs() -> list[str]:
        lines = service.logs(run["id"])
        return [line for line in lines if line.startswith("published ") and line.endswith(": 3 files added")]

    until(logs, "the log lines")

    def assets() -> list[dict[str, Any]]:
        events = service.events("prefect.asset.materialization.succeeded")
        return [one for one in events if one["resource"]["prefect.resource.name"] == "fruit"]

    assert f"file://{service.home}/texts" in [one["prefect.resource.id"] for one in until(assets, "the asset")[-1]["related"]]


@pytest.mark.parametrize(
    ("settings", "variables", "words"),
    [
        ({"tokenizer": {"name": "cl100k"}}, {}, "Did you mean 'cl100k_base'?"),
        # The roots of a worker and its command are the operator's. test_register.py has more variables.
        ({}, {"env": {"FLAT_TOKENS_OUTPUT_ROOTS": "/"}}, "'FLAT_TOKENS_OUTPUT_ROOTS' was unexpected"),
    ],
)
def test_wrong_parameters_are_refused_before_there_is_a_run(service, settings, variables, words):
    config = {**config_of(Path(), "wrong", Path("README.md")), **settings}
    path = f"/deployments/{service.deployment('build')['id']}/create_flow_run"
    refused = service.ask("POST", path, {"parameters": {"config": config}, "job_variables": variables, "tags": ["wrong"]})
    assert refused.status_code in (409, 422), refused.text
    assert words in refused.text
    assert service.runs("wrong") == []


def test_a_pool_of_another_type_is_the_operators(service):
    """Made before the deployments are registered, it keeps its template."""
    template = json.loads((CHECKOUT / "docker/kubernetes-job.json").read_text())
    (build,) = (one for one in read_deployments() if one["name"] == "build")
    with reaching(service), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="cluster", type="kubernetes", base_job_template=template))
        create_pools(client, [{**build, "work_pool": {**build["work_pool"], "name": "cluster"}}])
        pool = client.read_work_pool("cluster")
    assert (pool.type, pool.base_job_template) == ("kubernetes", template)


def test_registered_again_paused_schedules_stay_paused_and_those_of_people_stay(service, home):
    service.switch(False)
    path = f"/deployments/{service.deployment('fruit')['id']}/schedules"
    service.ask("POST", path, [{"schedule": {"cron": "0 5 * * 1"}, "active": True}]).raise_for_status()
    told = said_by("register", str(home / "fruit.yaml"), "--every", "10", of=service)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "registered refresh-dataset/fruit (paused)"
    own, added = sorted(service.deployment("fruit")["schedules"], key=lambda one: "cron" in one["schedule"])
    assert (own["active"], added["active"]) == (False, True)
    service.ask("DELETE", f"{path}/{added['id']}").raise_for_status()


STRANGERS = [
    ("POST", {}, 401),
    ("POST", {"Authorization": "Basic YWRtaW46cGFzc3dvcmQ="}, 401),
    ("POST", {"Authorization": "Bearer theirs"}, 401),
    # Pages may send without asking, if it is text; before a header of their own browsers ask. test_own_address.py has more.
    ("POST", {"Content-Type": "text/plain", "Origin": "http://evil.example"}, 403),
    ("OPTIONS", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}, 403),
]
"""Requests that may not make a deployment, which with a step of its own runs anything: method, headers, status of the answer."""


def test_what_answers_without_the_secret(service):
    """Whether the server is well, and the files of the UI, which asks for the secret. Other names get none of it."""
    root = service.url.removesuffix("/api")
    paths = ["/api/health", "/api/ready", "/", "/deployments", "/ui-settings"]
    for path in paths:
        given = requests.get(root + path, headers={"Accept": "text/html"}, timeout=60)
        assert given.status_code == 200, path
        assert service.secret not in given.text
        assert requests.get(root + path, headers={"Host": "evil.example"}, timeout=60).status_code == 403
    told = requests.get(f"{root}/ui-settings", timeout=60).json()
    assert (told["auth"], told["api_url"]) == ("BASIC", "/api")  # whichever of its names the browser shows
    assert service.ask("GET", "/version").status_code == 200

    for method, headers, status in STRANGERS:
        refused = requests.request(method, f"{service.url}/deployments/", data="{}", headers=headers, timeout=60)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (status, False)
    private = [
        "/version",
        "/admin/settings",
        "/admin/version",
        "/openapi.json",
        "/docs",
        "/csrf-token?client=x",
        "/Health",
        "/health/",
    ]
    for path in private:
        assert requests.get(service.url + path, timeout=60).status_code == 401, path


def heard(service: Service, path: str, token: str | None, protocols: list[Subprotocol] | None, headers: dict[str, str]) -> str:
    """The first message of a websocket, after a login."""
    address = f"ws://127.0.0.1:{service.port}/api/{path}"
    with connect(address, subprotocols=protocols, additional_headers=headers, proxy=None) as there:
        there.send(json.dumps({"type": "auth", "token": token}))
        return str(there.recv(30))


@pytest.mark.parametrize(
    "path",
    ["events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled", "work_pools/flat-tokens/workers/connect"],
)
def test_no_websocket_opens_without_the_secret(service, path):
    prefect, mine = [Subprotocol("prefect")], {"Origin": f"http://127.0.0.1:{service.port}"}
    assert "auth_success" in heard(service, path, service.secret, prefect, {})
    assert "auth_success" in heard(service, path, service.secret, prefect, mine)
    with pytest.raises(WebSocketException):
        heard(service, path, None, None, mine)
    for token, headers in [(None, mine), ("theirs", mine), (service.secret, {"Origin": "http://evil.example"})]:
        with pytest.raises(WebSocketException):
            heard(service, path, token, prefect, headers)


def test_nobody_else_reads_the_secret(service, home):
    """Arguments of processes are everybody's. Logs and the database may be."""
    for pid in family(service.process.pid):
        assert service.secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    private = [service.secret_file, *(path for path in (home / "prefect").rglob("*.db*") if path.is_file())]
    assert len(private) > 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    password = service.secret.removeprefix("admin:").encode()
    holders = [path for path in home.rglob("*") if path.is_file() and password in path.read_bytes()]
    assert holders == [service.secret_file]


def test_a_build_from_a_terminal_reports_to_it_by_the_line_that_it_printed(service, home):
    """In a shell, as printed. Without the secret the server lets no build in."""
    (line,) = (line for line in service.output.splitlines() if line.startswith("  from a shell "))
    assert f"Run builds at http://127.0.0.1:{service.port} under Deployments" in service.output
    assert str(service.secret_file) in service.output
    assert re.search(r"datasets       refresh-dataset/fruit \(next run \d{4}-\d\d-\d\d \d\d:\d\d UTC\)", service.output)
    assert "notifications  off: a failing run shows in the UI alone. Turn them on: --notify TYPE/NAME" in service.output
    config = {"output": f"{home}/typed", "source": {"path": f"{home}/texts"}, "tokenizer": "bytes", "name": "typed"}
    (home / "typed.yaml").write_text(json.dumps(config))
    command = line.removeprefix("  from a shell ").strip().replace("...", f"{home}/typed.yaml")
    done, alone = (
        subprocess.run(words, shell=True, cwd=CHECKOUT, env=environment(home), capture_output=True, text=True, timeout=300)
        for words in (command, command.replace("PREFECT_API_AUTH_STRING", "NOTHING"))
    )
    assert "Set PREFECT_API_AUTH_STRING" in alone.stderr
    assert done.returncode == 0, done.stderr
    assert [run["state_type"] for run in service.runs("flat-tokens", "dataset:typed")] == ["COMPLETED"]


class Webhook(BaseHTTPRequestHandler):
    """Keeps what it is told."""

    told: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def webhook() -> Iterator[tuple[str, set[int]]]:
    """Its address, and the processes of the services that were told of it."""
    with serving(HTTPServer(("127.0.0.1", 0), Webhook)) as url:
        yield f"{url}/", set()


@pytest.fixture
def pager(service: Service, webhook: tuple[str, set[int]]) -> None:
    """A block tells of what happens. It is registered once for each start of the service."""
    url, paged = webhook
    if service.process.pid in paged:
        return
    with reaching(service):
        json_data = {"subject": "{{subject}}", "body": "{{body}}"}
        CustomWebhookNotificationBlock(name="pager", url=url, json_data=json_data).save("pager", overwrite=True)
    told = said_by("register", "--notify", "custom-webhook/pager", of=service)
    assert told.returncode == 0, told.stderr
    paged.add(service.process.pid)


@pytest.mark.usefixtures("pager")
def test_a_version_that_waits_is_told_of_once_and_published_by_a_run_that_approves_it(service, home):
    source, output = home / "shrinking.jsonl", f"{home}/shrinking"
    config = config_of(home, "shrinking", source)

    def refresh(count: int) -> dict[str, Any]:
        source.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(count)))
        return service.ended(service.start_run("refresh", {"config": config}).json()["id"])

    runs = [refresh(count) for count in (20, 2, 2)]

    def states() -> list[str]:
        return [service.run(run["id"])["state_name"] for run in runs]

    until(lambda: states() == ["Completed", "Completed", "Suspended"], "the run to be shown as one that waits")
    refused = service.start_run("refresh", {"config": config, "publish_anyway": "no gate may stop it"})
    assert (refused.status_code, "'publish_anyway' was unexpected" in refused.text) == (409, True)
    page = service.artifacts(runs[1]["id"])["shrinking-held"]["data"]
    form = re.search(r"\[Approve it\]\(\.\./\.\./deployments/deployment/([^/]+)/run\?parameters=(.*?)\)", page)
    assert form[1] == service.deployment("approve")["id"]
    told = json.loads(unquote(form[2]))
    assert told["output"] == output
    approved = service.ended(service.start_run("approve", {**told, "reason": "it is smaller now"}).json()["id"])
    assert approved["state_type"] == "COMPLETED"
    assert latest(Path(output)) == Path(output, "versions", told["version"])
    assert states() == ["Completed"] * 3
    until(lambda: [one for one in Webhook.told if "a version waits" in one["subject"]], "the notification")
    assert len([one for one in Webhook.told if "shrinking" in one["subject"]]) == 1


@pytest.mark.usefixtures("pager")
def test_a_bad_document_fails_a_run_once_and_people_hear_of_it(service, home):
    """By the block whose name the service was registered with. The message names file and row; nothing is tried again."""
    (home / "bad.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    config = config_of(home, "bad", home / "bad.jsonl")
    run = service.ended(service.start_run("build", {"config": config}).json()["id"])
    assert (run["state_type"], run["run_count"]) == ("FAILED", 1)
    assert "bad.jsonl, line 2 (row 1)" in run["state"]["message"]
    heard = until(lambda: [one for one in Webhook.told if "bad" in one["subject"]], "the notification")
    assert heard[0]["subject"] == "build bad with bytes: Failed"
    assert "bad.jsonl" in heard[0]["body"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("slack-webhook/nobody", "There is no block slack-webhook/nobody.* at http.*/blocks/catalog/slack-webhook/create"),
        ("slack/alerts", "There is no type 'slack'; there are .*slack-webhook"),
    ],
)
def test_an_unknown_block_is_told_before_anything_is_registered(service, block, words):
    told = said_by("register", "--notify", block, of=service)
    assert (told.returncode, told.stdout) == (1, "")
    assert re.search(words, told.stderr)


def test_a_worker_that_is_killed_with_its_run_is_started_again_and_so_is_the_run(service, home):
    """The server, the UI and the schedules go on."""
    config = config_of_lines(home, "lines", 60_000)
    run_id = service.start_run("build", {"config": config}).json()["id"]
    process = until(lambda: service.run(run_id)["infrastructure_pid"], "the run's process")
    group = family(int(process))
    until(lambda: service.run(run_id)["state_type"] == "RUNNING", "the run to begin")
    (worker_id,) = (pid for pid in family(service.process.pid) if b"--name\0builds" in command_of(pid))
    kill(worker_id, *group)

    def crashed() -> list[str]:
        states = service.get(f"/flow_run_states/?flow_run_id={run_id}")
        return [state["message"] for state in states if state["type"] == "CRASHED"]

    (why,) = until(crashed, "the run to be marked")
    assert why.endswith(". It is started again, and resumes after the last stored shard.")
    until(lambda: "The worker 'builds' was killed by signal 9" in service.output, "the worker to be started again")
    again = until(lambda: run if (run := service.run(run_id))["state_type"] == "COMPLETED" else None, "the run to complete")
    assert again["run_count"] == 2
    assert service.process.poll() is None


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.nightly  # what an automation is, is in test_register.py; runs and workers that are killed are in test_killed.py
def test_the_slot_of_a_run_whose_worker_died_is_given_to_the_next_one(service, home):
    """When the automation that is shipped, told to wait for 15 seconds instead of minutes, has marked the run as crashed."""
    config = config_of_lines(home, "long", 200_000)
    (refresh,) = (one for one in read_deployments() if one["name"] == "refresh")
    elsewhere = {**refresh, "name": "elsewhere", "schedules": [], "work_pool": {**refresh["work_pool"], "name": "elsewhere"}}
    with reaching(service), get_client(sync_client=True) as client:
        create_pools(client, [elsewhere])
        register(client, elsewhere)
        (silent,) = (one for one in read_automations(client, None) if one.name == "flat-tokens-silent-runs")
        trigger = silent.trigger
        trigger.within, trigger.match_related = timedelta(seconds=15), {"prefect.resource.id": "prefect.tag.short-of-patience"}
        automate(client, silent.model_copy(update={"name": "short-of-patience"}))

    def start_one(*tags: str) -> str:
        return str(service.start_run("elsewhere", {"config": config}, tags).json()["id"])

    run_id = start_one("short-of-patience")
    with worker(service, "elsewhere") as pid:
        until(lambda: service.artifacts(run_id), "its progress")
        kill(*family(pid))

    with worker(service, "elsewhere"):
        crashed = service.ended(run_id)
        with reaching(service), get_client(sync_client=True) as client:
            for one in client.read_automations_by_name("short-of-patience"):  # heartbeats come every 30 seconds
                client.delete_automation(one.id)
        following = service.ended(start_one())
    assert crashed["state_type"] == "CRASHED"
    assert "Run it again" in crashed["state"]["message"]
    assert following["state_type"] == "COMPLETED"


def test_a_taken_port_is_refused(service):
    told = said_by("serve", "--port", str(service.port), of=service)
    assert told.returncode == 1
    assert told.stderr.startswith(f"Port {service.port} cannot be had (Address already in use).")


PROFILES = """active = "mine"

[profiles.mine]

[profiles.other]
PREFECT_API_URL = "http://127.0.0.1:PORT/api"
"""


@pytest.mark.usefixtures("pager", "refreshed")
def test_ctrl_c_stops_everything_and_the_next_start_goes_on(service, home):
    """Nothing is there twice when it is back. Profiles stay as they are, absent or with one of this address: Prefect's own
    command asks which one to change, or changes to it.
    """
    profiles = home / "prefect/profiles.toml"
    assert not profiles.exists()
    names, automations = service.names("deployments"), service.names("automations")
    by_hand = {"flow_id": service.deployment("build")["flow_id"], "state": {"type": "RUNNING"}, "tags": ["flat-tokens"]}
    run_id = service.ask("POST", "/flow_runs/", by_hand).json()["id"]  # as python -m flows build makes it
    pids = family(service.process.pid)[1:]
    assert len(pids) >= 3  # a server and two workers
    os.kill(service.process.pid, signal.SIGINT)
    assert service.process.wait(60) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the processes to end", 10)

    profiles.write_text(before := PROFILES.replace("PORT", str(service.port)))
    again = start(home, service.port, str(home / "fruit.yaml"), "--notify", "custom-webhook/later")
    try:
        assert f"Create one named later at http://127.0.0.1:{service.port}/blocks/catalog/custom-webhook/create" in again.output
        with reaching(again):
            CustomWebhookNotificationBlock(name="later", url="http://127.0.0.1:9/", json_data={}).save("later")
        until(lambda: "The block custom-webhook/later is used from now on." in again.output, "the block to be found")
        assert (again.names("deployments"), again.names("automations")) == (names, automations)
        assert again.deployment("fruit")["schedules"] == []
        assert profiles.read_text() == before
        assert again.run(run_id)["state_type"] == "RUNNING"  # its process is none of the service's
        left = family(again.process.pid)[1:]
        assert len(left) >= 3
        again.process.kill()  # nobody is there to stop them
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), "the processes to end")
    finally:
        end(again)
