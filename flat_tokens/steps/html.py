"""The step ``html``: the text of pages, by an installed package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial

import numpy as np

from flat_tokens.extras import extra, pa
from flat_tokens.steps.contract import Outcome

MODULES = {"resiliparse": "resiliparse.extract.html2text", "trafilatura": "trafilatura"}
"""Packages that make text of pages, and the module of each that does it."""
PLAIN = "text/plain"


class Html:
    """Replaces each page by its text. Documents without any are left out, as ``empty``. *package*: ``resiliparse`` or
    ``trafilatura``. *main_content*: without navigation and footers; trafilatura knows no other way. Documents whose kept
    column ``content_type`` says that they are plain text stay as they are.
    """

    def __init__(self, *, package: str = "resiliparse", main_content: bool = True) -> None:
        if package not in MODULES:
            raise ValueError(f"package is {package!r}; it should be one of {', '.join(MODULES)}")
        if not isinstance(main_content, bool) or (package == "trafilatura" and not main_content):
            raise ValueError("main_content is true, or false with resiliparse")
        module = extra(MODULES[package], "the step html")
        self.version = f"{package} {importlib.metadata.version(package)}"
        self._text: Callable[[str], str | None] = (
            partial(module.extract_plain_text, main_content=main_content) if package == "resiliparse" else module.extract
        )

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        kinds = documents.column("content_type").to_pylist() if "content_type" in documents.schema.names else None
        texts = [
            page if kinds is not None and kinds[i] == PLAIN else self._text(page) if page.strip() else None
            for i, page in enumerate(documents.column("text").to_pylist())
        ]
        found = pa.array([text or "" for text in texts], pa.large_string())
        return Outcome(np.array([bool(text) for text in texts], bool), "empty", found)
