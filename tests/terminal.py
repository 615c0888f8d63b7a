"""Commands as a person meets them, in this process: starting one for each takes two seconds longer."""

import json
from collections.abc import Callable
from typing import Any

import pytest


class Terminal:
    """Runs commands of a program, and returns what they print."""

    def __init__(self, main: Callable[[list[str]], int], capture: pytest.CaptureFixture[str]) -> None:
        self._main, self._capture = main, capture

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """The exit status of a command, its output, and its errors."""
        self._capture.readouterr()  # what the test printed before
        status = self._main([str(argument) for argument in arguments])
        return (status, *self._capture.readouterr())

    def with_more(self, *more: str) -> "Terminal":
        """The same for commands that end with more arguments."""
        return Terminal(lambda arguments: self._main([*arguments, *more]), self._capture)

    def out(self, *arguments: object, status: int = 0) -> str:
        """The output of a command that ends with this status."""
        found, out, errors = self(*arguments)
        assert found == status, errors
        return out

    def lines(self, *arguments: object) -> list[str]:
        """The lines of the output of a command that succeeds."""
        return self.out(*arguments).splitlines()

    def json(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        """The value that a command prints if it is asked for JSON."""
        return json.loads(self.out(*arguments, "--json", status=status))

    def errors(self, *arguments: object, status: int = 2) -> str:
        """The errors of a command that ends with this status."""
        found, out, errors = self(*arguments)
        assert found == status, out + errors
        return errors
