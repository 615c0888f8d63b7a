"""Commands of ``python -m flows`` as a person meets them, in this process: starting one for each takes two seconds longer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flows.commands.main import main


class Terminal:
    """Runs commands, and returns what they print."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """The exit status of a command, its output, and its errors."""
        status = main([str(argument) for argument in arguments])
        return (status, *self._capture.readouterr())

    def lines(self, *arguments: object) -> list[str]:
        """The output of a command that succeeds."""
        status, out, errors = self(*arguments)
        assert status == 0, errors
        return out.splitlines()

    def json(self, *arguments: object) -> dict[str, Any]:
        """The same, of a command that is asked for JSON."""
        status, out, errors = self(*arguments, "--json")
        assert status == 0, errors
        value: dict[str, Any] = json.loads(out)
        return value
