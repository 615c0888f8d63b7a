"""The step html: pages become text by a package, which is named where it is not installed."""

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flat_tokens.steps import open_steps
from tests.flat_tokens.steps.taking import taken
from tests.refusal import refusal


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that take the tags off."""

    def text(page: str, main_content: bool = True) -> str:
        return ("" if main_content else "all: ") + page.replace("<p>", "").replace("</p>", "")

    modules = {"resiliparse.extract.html2text": {"extract_plain_text": text}, "trafilatura": {"extract": text}}
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    version, ours = importlib.metadata.version, dict.fromkeys(("resiliparse", "trafilatura"), "1.2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: ours.get(name) or version(name))


def texts_of(pages: list[str], kinds: list[str] | None = None, **options: Any) -> tuple[list[str], dict[str, int], str]:
    steps = open_steps([{"use": "html", "options": options}])
    found = taken(steps, *pages, columns=pa.record_batch({"content_type": kinds}) if kinds else None)
    return found.texts.to_pylist(), dict(found.skipped), steps.described[0]["version"]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("package", ["resiliparse", "trafilatura"])
def test_pages_become_their_text_and_empty_ones_are_left_out(package):
    pages = ["<p>a</p>", "<p></p>", "", "<p>b"]
    assert texts_of(pages, package=package) == (["a", "b"], {"html.empty": 2}, f"{package} 1.2")


@pytest.mark.usefixtures("packages")
def test_plain_text_stays_and_options_are_the_packages():
    assert texts_of(["<p>a", "<p>b"], ["text/plain", "text/html"])[0] == ["<p>a", "b"]
    assert texts_of(["<p>a"], main_content=False)[0] == ["all: a"]
    with refusal("package is 'lxml'; it should be one of resiliparse, trafilatura"):
        texts_of([], package="lxml")
    with refusal("main_content is true, or false with resiliparse"):
        texts_of([], package="trafilatura", main_content=False)


@pytest.mark.needs("resiliparse")
def test_the_package_itself_leaves_navigation_out():
    body = "<body><nav><a href=/>Home</a></nav><article><p>Salt &amp; wind.</p></article></body>"
    page = f"<html><head><title>T</title></head>{body}</html>"
    texts = [
        texts_of([page], package="resiliparse", main_content=only)[0] for only in (True, False)
    ]  # steps are kept by their options
    assert texts == [["Salt & wind."], ["Home\n\nSalt & wind."]]


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    for name in ("resiliparse", "resiliparse.extract", "resiliparse.extract.html2text"):
        monkeypatch.setitem(sys.modules, name, None)
    with refusal(r"step html needs the package 'resiliparse'.*pip install resiliparse"):
        texts_of(["x"], main_content=True)  # steps are kept by their options
