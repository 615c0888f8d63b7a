"""The step ``datatrove``: any filter or formatter of that package, by its name and its options. It looks at one document after
another, as the package does, and takes as long.
"""

from __future__ import annotations

import importlib.metadata
import threading
from itertools import islice
from typing import Any

from flat_tokens.extras import extra, pa
from flat_tokens.steps.contract import Outcome

NOT_A_FUNCTION_OF_A_DOCUMENT = {
    "SamplerFilter": "draws documents in the order in which they come. Draw them with subset --fraction",
    "LambdaFilter": "takes a function, which a configuration cannot hold. Write a step: docs/steps.md",
}
TRIAL = "It was a dark night.\nThe rain fell in torrents, and the wind swept up the streets. " * 8
"""A document to try filters on: a package that one needs is missed when it looks at a document, not before."""


class DatatroveStep:
    """A filter or a formatter of datatrove's. *filter* or *formatter* is its name, the *options* are its own."""

    def __init__(self, *, filter: str | None = None, formatter: str | None = None, **options: Any) -> None:
        if (filter is None) == (formatter is None):
            raise ValueError("it needs the name of a filter or of a formatter, one of the two")
        if filter in NOT_A_FUNCTION_OF_A_DOCUMENT:
            raise ValueError(f"{filter} {NOT_A_FUNCTION_OF_A_DOCUMENT[filter]}")
        if filter == "C4BadWordsFilter" and options.get("keep_fraction"):
            raise ValueError("C4BadWordsFilter with keep_fraction draws documents in the order in which they come. Leave it out")
        if "exclusion_writer" in options:
            raise ValueError("exclusion_writer is not an option here: steps write nothing")
        self._options, self._threads = options, threading.local()
        self._is_filter = filter is not None
        self._kind = _found("filter", filter) if filter is not None else _found("formatter", str(formatter))
        self._document = extra("datatrove.data", "the step datatrove").Document
        self._result_of = extra("datatrove.pipeline.filters.base_filter", "the step datatrove").get_filter_result
        self.version = f"datatrove {importlib.metadata.version('datatrove')}"
        try:
            self._judge([(TRIAL, "trial", {})]) if self._is_filter else self._formatted(TRIAL)
        except ImportError as error:
            raise ValueError(f"{filter or formatter}: {error}") from error

    def _judge(self, documents: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[bool, str | None, str]]:
        """For each document, given as a text, an id and metadata: whether it stays, the reason, and its text from here on."""
        if "filter" not in self._threads.__dict__:
            self._threads.filter = self._kind(**self._options)  # it counts along, and threads share no count
        one, judged = self._threads.filter, []
        rest = iter([self._document(text=text, id=identity, metadata=kept) for text, identity, kept in documents])
        while batch := list(islice(rest, one.batch_size)):
            for document, said in zip(batch, one.filter_batch(batch), strict=True):
                keep, reason = self._result_of(said)
                judged.append((bool(keep), reason, document.text))
        return judged

    def _formatted(self, text: str) -> str:
        # A formatter of its own for each document: what replaces an address depends on those that it has replaced before.
        return str(self._kind(**self._options).format(text))

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        texts, keys = (documents.column(name).to_pylist() for name in ("text", "key"))
        if not self._is_filter:
            after = list(map(self._formatted, texts))
            return Outcome(text=None if after == texts else pa.array(after, pa.large_string()))
        kept = documents.select([name for name in documents.schema.names if name not in ("text", "key")])
        metadata = kept.to_pylist() if kept.num_columns else [{} for _ in texts]
        ids = [f"{key:016x}" for key in keys]
        judged = self._judge(list(zip(texts, ids, metadata, strict=True)))
        keep = pa.array([one[0] for one in judged], pa.bool_())
        reasons = pa.array([one[1] for one in judged], pa.string())
        after = [one[2] for one in judged]
        return Outcome(keep, reasons, None if after == texts else pa.array(after, pa.large_string()))


def _found(what: str, name: str) -> Any:
    """The filter or the formatter of that name. ValueError if datatrove has none."""
    module = extra(f"datatrove.pipeline.{what}s", "the step datatrove")
    place = {"filter": "filters.base_filter", "formatter": "formatters.base"}[what]
    base = vars(extra(f"datatrove.pipeline.{place}", "the step datatrove"))[f"Base{what.capitalize()}"]
    found = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)}
    if name not in found:
        raise ValueError(f"datatrove has no {what} {name!r}; it has {', '.join(sorted(found))}")
    return found[name]
