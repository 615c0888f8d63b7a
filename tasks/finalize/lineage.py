"""OpenLineage: events at the start and the end of a run that publishes, sent to OPENLINEAGE_URL if it is set.

The client is the optional package openlineage-python, which has its other settings (OPENLINEAGE_API_KEY, ...) from the
environment. Nothing of it decides anything: what is unknown is a warning.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from flat_tokens import __version__
from flat_tokens.annotations import JsonFacts
from flat_tokens.manifest import splits_of
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import one_line
from tasks.models import digest_of

logger = logging.getLogger(__name__)

URL, NAMESPACE = "OPENLINEAGE_URL", "OPENLINEAGE_NAMESPACE"


class LineageDataset(NamedTuple):
    """A dataset as OpenLineage names it. ``version``: a digest of what it held; None if nobody knows yet."""

    namespace: str
    name: str
    version: str | None = None
    rows: int | None = None
    byte_count: int | None = None
    files: int | None = None

    @classmethod
    def at(cls, location: str) -> LineageDataset:
        """The dataset at a path or URL: of a bucket, of a host, or ``file``."""
        scheme, _, path = location.partition("://")
        if not path:
            return cls("file", os.path.abspath(location))
        host, _, rest = path.partition("/")
        if scheme in ("hf", "memory"):
            return cls(scheme, path)
        return cls(f"{scheme}://{host}", rest or "/")


def inputs_of(request: Any) -> list[LineageDataset]:
    """The datasets that a request reads, as its settings name them."""
    if sources := getattr(request, "sources", None):
        places = (one.place for one in sources)
        return [LineageDataset.at(place if "://" in place else Store.at(place).url) for place in places]
    return [LineageDataset.at(place) for place in getattr(request, "inputs", None) or (request.path,)]


def with_digests(inputs: Sequence[LineageDataset], made_of: JsonFacts, documents: JsonFacts) -> list[LineageDataset]:
    """The inputs with what a manifest reports them: versions of datasets, or a digest of the names and contents of files."""
    if derived := made_of.get("inputs"):
        return [one._replace(version=of.get("version")) for one, of in zip(inputs, derived, strict=False)]
    read = {one["name"]: one.get("read") for one in documents.get("by_source") or ()}
    found = []
    for one, source in zip(inputs, made_of.get("sources") or (), strict=False):
        files = {file["name"]: file["sha256"] for file in source["files"]}
        digest = next(iter(files.values())) if len(files) == 1 else digest_of(files)
        sizes = sum(file["size"] for file in source["files"])
        known = {
            "version": source.get("revision") or f"sha256:{digest}",
            "rows": read.get(source["name"]),
            "byte_count": sizes,
            "files": len(files),
        }
        found.append(one._replace(**known))
    return found


def _part(name: str) -> Any:
    """A module of the client. ModuleNotFoundError, with the name of its package, if it is not installed."""
    try:
        return importlib.import_module(f"openlineage.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{URL} is set, but openlineage-python is not there: pip install openlineage-python") from error


class Lineage:
    """The events of a run. The first that is unknown is a warning, and nothing is tried again."""

    def __init__(self, request: Any) -> None:
        self._inputs, self._output = inputs_of(request), LineageDataset.at(Store.at(request.output).url)
        self._job = getattr(request, "name", None) or self._output.name.rstrip("/").rpartition("/")[2]
        self._outputs = list[LineageDataset]()
        self._client: Any = None
        self._run_id = ""

    def made(self, version: str, manifest: JsonFacts, *, is_published: bool) -> None:
        """Note what the run made of its inputs. A version that waits for a person is not an output yet."""
        totals = manifest["totals"]
        self._inputs = with_digests(self._inputs, manifest["provenance"], totals.get("documents") or {})
        rows = sum(totals[split]["seq_count"] for split in splits_of(totals))
        size = sum(one["size"] for one in manifest["objects"])
        facts = {"version": version, "rows": rows, "byte_count": size, "files": len(manifest["objects"])}
        self._outputs = [self._output._replace(**facts)] if is_published else []

    def tell(self, state: str, error: BaseException | None = None) -> None:
        """Send an event: START, COMPLETE or FAIL."""
        if state != "START" and self._client is None:
            return
        try:
            if self._client is None:
                self._client = _part("client").OpenLineageClient()
                self._run_id = str(_part("client.uuid").generate_new_uuid())
            self._client.emit(self._event(state, error))
        except Exception as problem:  # noqa: BLE001  the client, its transport and the network have errors of their own
            logger.warning("The lineage of the run is unknown: %s", one_line(problem))
            self._client = None

    def _event(self, state: str, error: BaseException | None) -> Any:
        """The event of a run that starts, completes or fails."""
        events, facets = _part("client.event_v2"), _part("client.facet_v2")
        message = facets.error_message_run.ErrorMessageRunFacet(one_line(error), "PYTHON") if error else None

        def dataset(kind: Any, statistics: Any, name: str, one: LineageDataset) -> Any:
            version = (
                {} if one.version is None else {"version": facets.dataset_version_dataset.DatasetVersionDatasetFacet(one.version)}
            )
            counts = {} if one.files is None else {name: statistics(rowCount=one.rows, size=one.byte_count, fileCount=one.files)}
            side = {f"{name[: name.index('S')]}Facets": counts}
            return kind(namespace=one.namespace, name=one.name, facets=version, **side)

        read, written = facets.input_statistics_input_dataset, facets.output_statistics_output_dataset
        counted_in, counted_out = read.InputStatisticsInputDatasetFacet, written.OutputStatisticsOutputDatasetFacet
        return events.RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            eventType=events.RunState[state],
            run=events.Run(runId=self._run_id, facets={"errorMessage": message} if message else {}),
            job=events.Job(namespace=os.environ.get(NAMESPACE, "flat-tokens"), name=self._job),
            producer=f"urn:flat-tokens:{__version__}",
            inputs=[dataset(events.InputDataset, counted_in, "inputStatistics", one) for one in self._inputs],
            outputs=[dataset(events.OutputDataset, counted_out, "outputStatistics", one) for one in self._outputs],
        )


@contextlib.contextmanager
def lineage_events(request: Any) -> Iterator[Lineage | None]:
    """Send events for a run, which is the block. Yields None if no receiver is set."""
    if not os.environ.get(URL):
        yield None
        return
    lineage = Lineage(request)
    lineage.tell("START")
    try:
        yield lineage
    except BaseException as error:
        lineage.tell("FAIL", error)
        raise
    lineage.tell("COMPLETE")
