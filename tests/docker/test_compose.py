"""docker/compose.yaml: what it promises about access, secrets and order, read from it; the processes are test_stack.py's."""

import re

import prefect.settings
import pytest
import yaml

from tests.docker.compose import COMPOSE, ROOT, SECRETS, Service, compose_config, read_services
from tests.docker.dockerfile import read_stages

ONCE = {"migrate", "register"}
REDIS = {"PREFECT_REDIS_MESSAGING_URL", "PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL"}  # prefect-redis reads these
OURS = {"migrate", "server", "services", "register", "builds", "groups"}


@pytest.fixture(scope="module")
def compose_services() -> dict[str, Service]:
    return read_services(SECRETS)


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.needs("bin/docker-compose")
def test_compose_refuses_it_without_a_secret(name):
    done = compose_config({**SECRETS, name: ""})
    assert done.returncode != 0
    assert f"set {name} in docker/.env" in done.stderr


def test_no_secret_stands_in_the_files():
    """Secrets come from docker/.env, which git and the image's build leave out; the example has none."""
    example = (ROOT / "docker/.env.example").read_text("utf-8")
    for name in SECRETS:
        assert f"\n{name}=\n" in example
    assert ".env" in (ROOT / "docker/.gitignore").read_text("utf-8").split()
    for line in COMPOSE.read_text("utf-8").splitlines():
        if re.search(r"(PASSWORD|AUTH_STRING|REDISCLI_AUTH):", line):
            assert "${" in line or "*auth" in line, line
    variables = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text("utf-8")))
    assert set(re.findall(r"^#?(\w+)=", example, re.MULTILINE)) <= variables


def test_no_secret_is_an_argument_of_a_process(compose_services):
    """Every user of the machine, and every log of its processes, sees arguments."""
    for name, service in compose_services.items():
        shown = str([service.get("command"), service.get("entrypoint"), service.get("healthcheck"), service.get("labels")])
        assert not [secret for secret in SECRETS.values() if secret in shown], name


def test_only_the_servers_port_is_published_and_on_loopback(compose_services):
    published = {name: service["ports"] for name, service in compose_services.items() if "ports" in service}
    assert list(published) == ["server"]
    assert [(port["host_ip"], port["published"], port["target"]) for port in published["server"]] == [("127.0.0.1", "4200", 4200)]


def test_server_and_clients_have_the_same_authentication(compose_services):
    for name in OURS:
        environment = compose_services[name]["environment"]
        given = {environment.get("PREFECT_SERVER_API_AUTH_STRING"), environment.get("PREFECT_API_AUTH_STRING")} - {None}
        assert given == {SECRETS["AUTH_STRING"]}, name


def test_pages_of_others_may_not_call_the_server(compose_services):
    """Without the setting Prefect answers the pages of all origins. Its own page calls it by the name that it was loaded from."""
    for chosen in (compose_services, read_services({**SECRETS, "PUBLIC_URL": "https://prefect.example"})):
        environment = chosen["server"]["environment"]
        assert environment["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == ""
        assert environment["PREFECT_SERVER_UI_API_URL"] == "/api"


def test_workers_reach_neither_database_nor_redis_nor_their_passwords(compose_services):
    """Who writes to Redis runs code in the server; flows run what people ask for."""
    networks = yaml.safe_load(COMPOSE.read_text("utf-8"))["networks"]
    assert networks["database"]["internal"] is True
    for name in ("builds", "groups", "register"):
        assert list(compose_services[name]["networks"]) == ["workers"]
        assert SECRETS["POSTGRES_PASSWORD"] not in str(compose_services[name])
        assert SECRETS["REDIS_PASSWORD"] not in str(compose_services[name])
    for name in ("postgres", "redis"):
        assert list(compose_services[name]["networks"]) == ["database"]


def test_runs_read_and_write_where_the_operator_says(compose_services):
    for name in ("builds", "groups"):
        assert compose_services[name]["environment"]["FLAT_TOKENS_OUTPUT_ROOTS"] == "/data"
        assert "/data" in compose_services[name]["environment"]["FLAT_TOKENS_INPUT_ROOTS"].split(",")
    chosen = read_services({**SECRETS, "OUTPUT_ROOTS": "gs://bucket/tokens"})
    assert chosen["groups"]["environment"]["FLAT_TOKENS_OUTPUT_ROOTS"] == "gs://bucket/tokens"


def test_every_container_is_confined(compose_services):
    confined = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True}
    for name, service in compose_services.items():
        assert {key: service[key] for key in confined} == confined, name
        assert not service["user"].startswith("0"), name
        assert "privileged" not in service, name
        assert {volume["type"] for volume in service.get("volumes", ())} <= {"volume"}, name
    (user,) = read_stages()[-1].values("USER")
    assert {compose_services[name]["user"] for name in OURS} == {user}


def test_what_runs_on_is_restarted_limited_and_watched(compose_services):
    for name, service in compose_services.items():
        if name in ONCE:
            assert service["restart"] == "no"
            continue
        assert service["restart"] == "unless-stopped", name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}, name
        # Workers and the server have the image's check; the background services listen to nothing.
        if name in ("builds", "groups"):
            assert "--with-healthcheck" in service["command"]
        elif name != "services":
            assert "test" in service.get("healthcheck", {}) or "HEALTH_URL" in service["environment"], name


def test_a_worker_takes_one_group_at_a_time(compose_services):
    command = compose_services["groups"]["command"]
    assert command[command.index("--limit") + 1] == "1"


def test_settings_are_ones_that_this_prefect_knows(compose_services):
    """A setting with a typing error is ignored without a word."""
    for name in OURS:
        for setting in compose_services[name]["environment"]:
            if setting.startswith("PREFECT_"):
                assert hasattr(prefect.settings, setting) or setting in REDIS, setting
