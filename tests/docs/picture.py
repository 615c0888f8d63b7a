"""Make docs/pictures/run.png, the picture of a build in the UI: ``.venv/bin/python -m tests.docs.picture``.

It starts what ``make serve`` starts, on a free port with a database of its own, builds the demo against it, and has a browser
draw the run's page. It needs Chromium, which the lock does not hold (Debian: ``apt-get install chromium``). CHROMIUM names
another one, such as google-chrome. The script speaks to the browser by the DevTools protocol, through websockets, which Prefect
brings.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.deployments.service import CHECKOUT, Service, end, start
from tests.processes import free_port, until

PICTURE = CHECKOUT / "docs" / "pictures" / "run.png"
WIDTH, HEIGHT = 1200, 604
MAX_BYTES = 150_000
SETTLED_SECONDS = 8.0


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.sent = 0

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        self.sent += 1
        self.connection.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.connection.recv(timeout=60))
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise ValueError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression on the page."""
        return self.tell("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")


@contextlib.contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """A Chromium with a profile of its own below *home*, at a page that is empty."""
    name = os.environ.get("CHROMIUM", "chromium")
    program = shutil.which(name)
    if program is None:
        raise FileNotFoundError(f"{name} is not installed. Install Chromium, or name another one by CHROMIUM.")
    # As root, which containers often are, Chromium starts without its sandbox only; it sees nothing but our own server.
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
    process = subprocess.Popen([*command, f"--user-data-dir={home}", "about:blank"], stderr=subprocess.DEVNULL)
    try:
        port_file = home / "DevToolsActivePort"
        until(lambda: port_file.exists() and "\n" in port_file.read_text(), "Chromium to start")
        port = port_file.read_text().partition("\n")[0]
        with connect(f"ws://127.0.0.1:{port}/devtools/page/{_page(port)}", max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(30)


def _page(port: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
        (page,) = (one["id"] for one in json.load(answer) if one["type"] == "page")
        return str(page)


def build_demo(service: Service) -> str:
    """Build the demo in a directory of the service's own, watched by its server; the id of the run."""
    directory = service.home / "build"
    directory.mkdir()
    (directory / "deployments").symlink_to(CHECKOUT / "deployments")
    subprocess.run(
        [sys.executable, "-m", "flows", "build", "deployments/demo/demo.yaml", "--quiet"],
        cwd=directory,
        env={**service.environment, "PYTHONPATH": str(CHECKOUT)},
        check=True,
    )

    def ended() -> str | None:
        wanted = {"flow_runs": {"tags": {"all_": ["dataset:demo"]}, "state": {"type": {"any_": ["COMPLETED"]}}}, "limit": 1}
        return next((one["id"] for one in service.get("/flow_runs/filter", wanted)), None)

    return until(ended, "the run to be in the database")


def photograph(page: Browser, service: Service, run: str) -> bytes:
    """PNG of a run's page, as someone sees it who has given the secret."""
    page.tell("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    address = f"http://127.0.0.1:{service.port}"
    page.tell("Page.navigate", url=f"{address}/login")
    until(lambda: page.run("document.readyState") == "complete", "the UI to load")
    known = base64.b64encode(service.secret.encode()).decode()
    page.run(f"localStorage.setItem('prefect-password', '{known}')")
    page.tell("Page.navigate", url=f"{address}/runs/flow-run/{run}")
    until(lambda: page.run("document.querySelector('canvas') !== null"), "the graph of the run")
    # The graph is drawn and then moved to where all of it is seen. The page does not say when that is done.
    time.sleep(SETTLED_SECONDS)
    return base64.b64decode(page.tell("Page.captureScreenshot", format="png")["data"])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="flat-tokens-picture-") as home:
        service = start(Path(home), free_port())
        try:
            run = build_demo(service)
            with browser(Path(home, "chromium")) as page:
                picture = photograph(page, service, run)
        finally:
            end(service)
    if len(picture) > MAX_BYTES:
        raise ValueError(f"The picture has {len(picture)} bytes, and {PICTURE.name} may have {MAX_BYTES}.")
    PICTURE.write_bytes(picture)
    print(f"{PICTURE.relative_to(CHECKOUT)}: {WIDTH} x {HEIGHT}, {len(picture)} bytes")


if __name__ == "__main__":
    main()
