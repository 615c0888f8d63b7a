"""``make serve`` in a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployments.service import CHECKOUT, environment
from tests.examples import first_fast
from tests.processes import free_port

PROFILES = """active = "mine"

[profiles.mine]

[profiles.other]
PREFECT_API_URL = "http://127.0.0.1:PORT/api"
"""


@pytest.mark.parametrize("profiles", first_fast([PROFILES, None], 0, every=2), ids=["profiles", "fresh"])
def test_in_a_terminal_it_asks_nothing_and_leaves_the_profiles_alone(tmp_path: Path, profiles: str | None) -> None:
    """Prefect's own command asks which profile to change, or changes to the one of this address."""
    port, file = free_port(), tmp_path / "prefect" / "profiles.toml"
    if profiles is not None:
        file.parent.mkdir(mode=0o700)
        file.write_text(profiles.replace("PORT", str(port)))
    before = file.read_text() if file.exists() else None
    ours, theirs = pty.openpty()
    told = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "wb") as end_of_it:
        command = [sys.executable, "deployments/serve.py", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment(tmp_path), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        end_of_it.close()
        try:
            while b"from a shell" not in told and select.select([terminal], [], [], 180)[0]:
                told += terminal.read(1 << 16)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert b"Run builds at" in told, told
    assert b"proceed?" not in told
    assert (file.read_text() if file.exists() else None) == before
