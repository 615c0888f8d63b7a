"""The server of make serve: it answers no foreign page and no other user of the machine, its transactions on SQLite wait for each
other, and garbage goes without stopping anybody.
"""

import asyncio
import gc
import os
import shlex
import socket
import stat
import subprocess
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.serve import private_home, secret_in
from deployments.server import collect_garbage, listen, own_address_only
from tests.processes import python, until
from tests.refusal import refusal


async def _application(scope: Any, receive: Any, send: Any) -> None:
    """Answers all that it is asked."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


def answer(kind: str, headers: str, port: int = 4200) -> Any:
    """The first thing that the server tells whoever sent these headers: an HTTP status, or the type of a websocket message."""
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    pairs = (one.split(": ") for one in headers.split(", ") if one)
    raw = [(name.lower().encode(), value.encode()) for name, value in pairs]
    scope = {"type": kind, "method": "POST", "path": "/api/deployments/", "headers": raw}
    asyncio.run(own_address_only(_application, port)(scope, receive, send))
    return sent[0].get("status", sent[0]["type"])


OWN = [
    "Host: 127.0.0.1:4200",
    "Host: localhost:4200",
    "Host: [::1]:4200",
    "Host: LocalHost:4200, Origin: http://localhost:4200",
    "Host: 127.0.0.1:4200, Origin: http://127.0.0.1:4200",
    "Host: [::1]:4200, Origin: http://[::1]:4200, Sec-Fetch-Dest: document",
]
FOREIGN = [
    "",
    "Host: ",
    "Host: evil.example",
    "Host: evil.example:4200",
    "Host: EVIL.example:4200",
    "Host: localhost.evil.example:4200",
    "Host: evil.example@localhost:4200",
    "Host: localhost:4200.evil.example",
    "Host: localhost.:4200",
    "Host: localhost",
    "Host: 127.0.0.1:4201",
    "Host: 127.0.0.1:04200",
    "Host: 127.1:4200",
    "Host: 0.0.0.0:4200",
    "Host: [::]:4200",
    "Host: ::1:4200",
    "Host: localhost:4200, Host: localhost:4200",
    "Host: localhost:4200, Host: evil.example",
    "Host: localhost:4200, Origin: null",
    "Host: localhost:4200, Origin: ",
    "Host: localhost:4200, Origin: http://evil.example",
    "Host: localhost:4200, Origin: http://localhost:4200.evil.example",
    "Host: localhost:4200, Origin: http://localhost",
    "Host: localhost:4200, Origin: http://localhost:4201",
    "Host: localhost:4200, Origin: https://localhost:4200",
    "Host: localhost:4200, Origin: http://127.0.0.1:4200",
    "Host: localhost:4200, Origin: http://localhost:4200, Origin: http://evil.example",
    "Host: evil.example:4200, Origin: http://evil.example:4200",
    "Host: evil.example:4200, X-Forwarded-Host: localhost:4200",
    "Host: localhost:4200, Sec-Fetch-Dest: iframe",
    "Host: localhost:4200, Sec-Fetch-Dest: object",
]


@pytest.mark.parametrize("headers", OWN)
def test_its_own_address_and_its_own_pages_are_answered(headers):
    assert answer("http", headers) == 200
    assert answer("websocket", headers) == "websocket.accept"


@pytest.mark.parametrize("headers", FOREIGN)
def test_other_names_and_other_pages_are_refused(headers):
    """Whatever the path: the name of another site may lead to this machine, and its pages then share that name (rebinding)."""
    assert answer("http", headers) == 403
    assert answer("websocket", headers) == "websocket.close"


def test_browsers_leave_out_port_80():
    assert answer("http", "Host: localhost, Origin: http://localhost", 80) == 200
    assert answer("http", "Host: localhost:4200", 80) == 403


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_secret_is_random_kept_and_readable_by_its_user_alone(tmp_path, no_umask):
    one, other = tmp_path / "new/secret", tmp_path / "secret"
    secret = secret_in(one)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
    assert secret_in(one) == secret == one.read_text().strip()
    assert len(secret) > 40
    assert secret_in(other) != secret


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        *((mode, "admin:a-secret-that-is-long\n") for mode in (0o644, 0o640, 0o620, 0o604)),
        *((0o600, text) for text in ("", "\n", "admin:short\n", "admin:ein-längeres-geheimnis\n")),
    ],
)
def test_a_secret_that_other_users_may_know_or_that_is_none_is_not_used(tmp_path, mode, text):
    """With an empty one Prefect would let everybody in."""
    path = tmp_path / "secret"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    with refusal(r"secret: others may know this secret, or it is not a long ASCII text\. Remove it, and start again"):
        secret_in(path)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_somebody_has_by_either_name_of_this_machine_is_refused(family):
    """Or a browser at http://localhost would tell the secret to whoever listens at the other one."""
    try:
        taken = socket.create_server(("127.0.0.1" if family == socket.AF_INET else "::1", 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        with refusal(rf"Port {port} cannot be had \(Address already in use\)\. Stop what listens there"):
            listen(port)
    for one in listen(port):
        assert one.getsockname()[0] in ("127.0.0.1", "::1")
        one.close()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_told(port):
    with refusal(f"There is no port {port}"):
        listen(port)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o705, 0o701, 0o710, 0o770])
def test_a_home_that_others_may_enter_is_refused_with_the_command_that_closes_it(tmp_path, mode):
    """The database in it has the secrets of blocks, and the key to them."""
    home = tmp_path / "a home"
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(ValueError, match="is open to other users") as refused:
        private_home(home)
    command = str(refused.value).partition("Close it: ")[2]
    subprocess.run(shlex.split(command), check=True)
    for name in ("prefect.db", "prefect.db-wal"):
        (home / name).touch()
        (home / name).chmod(0o644)
    assert private_home(home) == home
    assert {stat.S_IMODE((home / name).stat().st_mode) for name in ("prefect.db", "prefect.db-wal")} == {0o600}


def test_a_home_that_is_not_there_is_made_for_its_user_alone(tmp_path, no_umask):
    assert stat.S_IMODE(private_home(tmp_path / "new").stat().st_mode) == 0o700


COUNT = """
import asyncio, sys
import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration
from deployments.server import begin_as_writers

async def main():
    database = AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{sys.argv[1]}")
    engine = await database.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("create table counter as select 0 as n"))

    async def count():
        async with await database.session(engine) as session, database.begin_transaction(session):
            n = (await session.execute(sa.text("select n from counter"))).scalar()
            await asyncio.sleep(0.05)
            await session.execute(sa.text("update counter set n = :n"), {"n": n + 1})

    done = await asyncio.gather(*(count() for _ in range(4)), return_exceptions=True)
    print(sum(isinstance(one, Exception) for one in done))

begin_as_writers()
asyncio.run(main())
"""


@pytest.mark.slow
def test_transactions_that_read_and_then_write_wait_for_each_other(tmp_path):
    """Of four that read and then write none fails."""
    assert python("-W", "ignore", "-c", COUNT, str(tmp_path / "ours.db"), check=True).stdout == "0\n"


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_beside_the_work():
    over = threading.Event()
    gc.disable()
    thread = threading.Thread(target=collect_garbage, args=(over,))
    try:
        thread.start()
        gone = weakref.ref(_Cycle())
        until(lambda: gone() is None, "the garbage stays")
    finally:
        over.set()
        thread.join()
        gc.enable()
