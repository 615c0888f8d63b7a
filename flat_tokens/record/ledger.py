"""A run's ledger: the history of a mixture in one small JSON file, from which every batch follows, past and future."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.arrays.layouts import to_json
from flat_tokens.manifest import check, check_format, dataset_of, digest_below
from flat_tokens.options import at_least, true_or_false
from flat_tokens.reader import open_split, resolve
from flat_tokens.rows.loader import View, checked_seed
from flat_tokens.rows.mixture import MixedSource, Mixture, check_weights, checked_epochs, is_weight, source_of
from flat_tokens.rows.phases import ORDER, Edit, Schedule
from flat_tokens.rows.views import SplitView
from flat_tokens.stores.store import PathOrUrl, Store, read_json

FORMAT, FORMAT_VERSION = "flat-tokens-run", 2
MAX_LEDGER_BYTES = 1 << 24
DATASET = {"path": str, "split": str, "content?": str, "token_count": int, "seq_count": int}
SOURCE = {"name": str, "rows": int, "epochs?": int, "dataset?": DATASET, "view?": {"rows": str}, "replaced_by?": str}
SHAPE = {"seed": int, "order": int, "sources": [SOURCE], "edits": [{"step": int, "batch_size": int, "weights": {}}]}
ANYWHERE = ("path", "split", "fields", "framework")
"""These may differ where a run goes on: the place of a dataset, and the arrays in which its rows are handed out."""
ROWS = {
    "packed": {"length", "overlap"},
    "documents": {"max_length", "pad_id"},
    "blocks": {"length"},
    "packed_documents": {"length", "split_across_pack", "max_packs", "fit", "too_long", "padding_idx", "pad_to", "on_crop"},
}
"""The views that a ledger may ask for, and their settings: none is a place that is written to."""


class ReplacedView:
    """A source whose dataset is gone: *rows* rows, like those of *like*, none of which can be read."""

    def __init__(self, rows: int, like: View, reason: str) -> None:
        self._rows, self._like, self.reason = rows, like, reason

    def __len__(self) -> int:
        return self._rows

    def batch(self, indices: Any) -> Any:
        """No rows at all. FileNotFoundError for any row."""
        if len(indices):
            raise FileNotFoundError(f"{self.reason}. Its rows, such as {int(indices[0])}, cannot be read any more")
        return self._like.batch(indices)


NewSource: TypeAlias = float | Schedule | MixedSource
"""An edit gives a source that the run knows its weight, and a new one its view, weight and, if wanted, epochs."""


class Ledger:
    """The history of a run: its seed, its sources, and from which step on it has which weights and batch size.

    ``Ledger.create(path, sources, batch_size)`` begins a run, ``Ledger.open(path)`` goes on with one, on any host. ``mixture()``
    gives the batches by step. One process edits a ledger; the others open it again.
    """

    def __init__(
        self,
        path: PathOrUrl,
        content: JsonObject,
        views: Mapping[str, View],
        places: Mapping[str, str],
        trust_records: bool,
    ) -> None:
        directory, name = posixpath.split(os.fspath(path))
        self._store, self._key = Store.at(directory or "."), name
        self._content, self._views, self._places, self._trusted = content, dict(views), dict(places), trust_records

    @classmethod
    def create(cls, path: PathOrUrl, sources: Mapping[str, MixedSource], batch_size: int, seed: int = 0) -> Self:
        """Begin a run and write its ledger. *sources*, *batch_size* and *seed* are those of a `Mixture`.

        FileExistsError if there is one already; ValueError for sources that no mixture can have.
        """
        self = cls(path, {"seed": checked_seed(seed), "order": ORDER, "sources": [], "edits": []}, {}, {}, True)
        if self._store.exists(self._key):
            raise FileExistsError(f"{self.path}: there is a ledger already. Go on with it: Ledger.open, then edit")
        self._write(*self._edited(0, sources, batch_size))
        return self

    @classmethod
    def open(
        cls,
        path: PathOrUrl,
        *,
        views: Mapping[str, View] | None = None,
        places: Mapping[str, str] | None = None,
        trust_records: bool = False,
    ) -> Self:
        """Read a ledger. *views* are sources' views that the caller has opened, *places* paths or URLs of their datasets.

        The others' datasets are opened where the ledger says, if that is a path of this machine; URLs in it are followed with
        *trust_records*. FileNotFoundError if there is no file; ValueError, naming it, if it is not a ledger.
        """
        self = cls(path, {}, views or {}, places or {}, true_or_false("trust_records", trust_records))
        try:
            content = read_json(self._store, self._key, MAX_LEDGER_BYTES, "a ledger")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.path}: there is no ledger. Begin one with Ledger.create") from error
        try:
            check_format(content, FORMAT, FORMAT_VERSION)
            self._content = {name: content[name] for name in SHAPE if name in content}
            check(self._content, SHAPE, "it")
            if isinstance(order := content.get("order"), bool) or order != ORDER:
                raise ValueError(f"order {order!r}")
            names = [source["name"] for source in self._content["sources"]]
            if len(set(names)) < len(names) or not self._content["edits"]:
                raise ValueError("names come twice, or there are no edits")
            self._edits()
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            remedy = "Restore it from a copy."
            raise ValueError(f"{self.path}: is not a ledger that is understood here ({error}). {remedy}") from error
        for given in (*self._views, *self._places):
            self._source(given)
        return self

    @property
    def path(self) -> str:
        """The path or URL of the file."""
        return self._store.path(self._key)

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return hashlib.sha256(self._store.read(self._key)).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names: those that were ever in the run, in the order in which they came."""
        return tuple(source["name"] for source in self._content["sources"])

    def dataset(self, name: str) -> tuple[str, str] | None:
        """Path or URL of the dataset of a source, and the split. None for a view that is of no dataset.

        ValueError if the ledger names a URL, and is not trusted.
        """
        if (dataset := self._source(name).get("dataset")) is None:
            return None
        if name in self._places:
            return self._places[name], dataset["split"]
        if not self._trusted and not posixpath.isabs(dataset["path"]):
            raise ValueError(
                f"{self.path}: says that source {name!r} is at {dataset['path']}, which is not a path of this machine. "
                "Say where it is, with its place or view, or trust the ledger (trust_records)."
            )
        return dataset["path"], dataset["split"]

    def view(self, name: str) -> View:
        """The view of a source, which is opened at first use. ValueError if it is not what the run was begun with."""
        source = self._source(name)
        if name not in {*self._views, *self._places} and (other := source.get("replaced_by")) is not None:
            reason = f"{self.path}: the dataset of source {name!r} was replaced, as documents were forgotten"
            self._views[name] = ReplacedView(source["rows"], self.view(other), reason)
        if isinstance(self._views.get(name), ReplacedView):
            return self._views[name]
        if name not in self._views:
            if (where := self.dataset(name)) is None:
                raise ValueError(
                    f"{self.path}: source {name!r} is a view of no dataset. Open the ledger with views={{{name!r}: view}}"
                )
            self._views[name] = self._open(source, where)
        described = _described(name, self._views[name], source.get("epochs"))
        for key, was in source.items():
            now = described.get(key)
            if isinstance(was, dict) and isinstance(now, dict):
                was, now = ({fact: value for fact, value in found.items() if fact not in ANYWHERE} for found in (was, now))
            if was != now and key != "replaced_by":
                raise ValueError(
                    f"{self.path}: source {name!r} is not what the run has: its {key} is {now}, but in the ledger it is {was}. "
                    "Open the same dataset with the same settings, or add it as a new source."
                )
        return self._views[name]

    def documents_of(self, name: str) -> tuple[SplitView, str, str]:
        """The view of a source, the path or URL of its dataset, and the split. ValueError if its documents are not known."""
        view, where = self.view(name), self.dataset(name)
        if where is None or not isinstance(view, SplitView):
            reason = getattr(view, "reason", f"{self.path}: source {name!r} is a view of no dataset")
            raise ValueError(f"{reason}, so that its documents are not known. A copy of the dataset can be its place (--at)")
        return view, *where

    def _open(self, source: JsonFacts, where: tuple[str, str]) -> View:
        """The view of a source, of the split *where*: path or URL, and its name."""
        name, settings = source["name"], dict(source.get("view") or {})
        if (rows := settings.pop("rows", None)) not in ROWS:
            raise ValueError(f"{self.path}: the rows of source {name!r} are {rows!r}, but they are one of {', '.join(ROWS)}")
        if "selection" in settings:
            raise ValueError(
                f"{self.path}: source {name!r} is of selected documents, of which the ledger has a digest alone. Select them "
                f"again and open the ledger with views={{{name!r}: view}}"
            )
        known = ROWS[rows] | {"bos", "eos", "loss_mask", "fim", "fields", "framework"}
        if unknown := settings.keys() - known:
            has = ", ".join(sorted(known))
            raise ValueError(f"{self.path}: source {name!r}: {rows!r} has no setting {min(unknown)!r}; it has {has}")
        path, split = where
        try:
            view: View = getattr(open_split(resolve(Store.at(path)) / split), rows)(**settings)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                f"{self.path}: source {name!r}: {error}. If it has moved, say where it is (places, --at)"
            ) from error
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{self.path}: source {name!r}: {error}") from error
        except OSError as error:
            raise type(error)(error.errno, f"{self.path}: source {name!r}: {error.strerror or error}", error.filename) from error
        return view

    def mixture(self, *, steps: int | None = None) -> Mixture:
        """The batches of the run, past and future: a mixture of all sources, in the order of ``names``.

        After the sources' epochs, or after *steps*, it ends. ValueError if a source is not what it was.
        """
        views = {name: self.view(name) for name in self.names}
        epochs = [source.get("epochs") for source in self._content["sources"]]
        try:
            return Mixture.of_edits(views, epochs, self._edits(), self._content["seed"], steps)
        except OverflowError as error:
            raise ValueError(
                f"{self.path}: is not a ledger that is understood here ({error}). Restore it from a copy."
            ) from error

    def steps_before(self, step: int | None, remedy: str) -> int:
        """How many steps the run has before *step*, or in all. ValueError, with a *remedy*, if it has no end and no step is
        given.
        """
        try:
            last = len(self.mixture())
        except TypeError:
            if step is None:
                raise ValueError(f"{self.path}: the run has no end. Say {remedy}") from None
            return step
        return last if step is None else min(step, last)

    def edit(self, step: int, sources: Mapping[str, NewSource] | None = None, *, batch_size: int | None = None) -> None:
        """From *step* on, the run has *sources*, all of them, and batches of *batch_size*; without one of them, as before.

        ``{name: weight}`` keeps a source, or takes it back: it goes on in its own epochs where it was left. ``{name: (view,
        weight)}`` or ``(view, weight, epochs)`` adds one. Sources that are not named are withdrawn. A replacement is a new
        source, with a name and epochs of its own. Batches before *step* stay the same.

        ValueError for a step before the last edit or after the run's end, a new source with a name that the run knows, and
        what no mixture can have. The file is written if all is well.
        """
        last = self._content["edits"][-1]
        if (step := at_least(0, "step", step)) < last["step"]:
            raise ValueError(
                f"{self.path}: an edit from step {step} on would change the past: there is one from step {last['step']}"
            )
        weights = self._edits()[-1].weights
        kept: Mapping[str, NewSource] = {self.names[k]: weight for k, weight in weights.items()} if sources is None else sources
        self._write(*self._edited(step, kept, last["batch_size"] if batch_size is None else batch_size))

    def replace(self, step: int, name: str, dataset: str) -> str:
        """From *step* on, a new source with the same split and settings, of the version at *dataset*, takes the place of source
        *name*, whose version is removed: the same without documents that are forgotten. Return its name.

        Batches before *step* are known by their rows, but those of *name* cannot be read any more. A source that was withdrawn
        stays so. ValueError as for `edit`. Done before, nothing is done.
        """
        source = self._source(name)
        if (former := source.get("replaced_by")) is not None:
            return str(former)
        weights = {self.names[k]: weight for k, weight in self._edits()[-1].weights.items()}
        if name not in weights:
            new = next(iter(weights))
        else:
            new = next(one for number in range(2, 2 + len(self.names)) if (one := f"{name}-{number}") not in self.names)
        view = self._open(source, (dataset, source["dataset"]["split"])) if name in weights else None
        marked = [one if one["name"] != name else {**one, "replaced_by": new} for one in self._content["sources"]]
        before, self._content = self._content, {**self._content, "sources": marked}
        kept: JsonObject = {one: weight for one, weight in weights.items() if one != name}
        if view is not None:
            kept[new] = (view, weights[name], source.get("epochs"))
        self._views.pop(name, None)
        try:
            self._write(*self._edited(step, kept, before["edits"][-1]["batch_size"]))
        except BaseException:
            self._content = before
            raise
        return new

    def _edited(self, step: int, sources: Mapping[str, NewSource], batch_size: int) -> tuple[JsonObject, dict[str, View]]:
        """The content and the views with one more edit, which was tried."""
        if not sources:
            raise ValueError("a mixture needs at least one source")
        known, views, weights = list(self._content["sources"]), dict(self._views), {}
        for name, given in sources.items():
            if not isinstance(given, tuple | list) and (name in self.names or is_weight(given)):
                self._source(name)
                weights[name] = _as_json_holds(given)
                continue
            if name in self.names:
                raise ValueError(f"the run has had a source {name!r}. Give its weight alone, or the new source another name.")
            view, weight, epochs = source_of(name, given)
            weights[name] = _as_json_holds(weight)
            known.append(_described(name, view, epochs))
            views[name] = view
        check_weights(weights)
        described = {name: weight.as_json() if isinstance(weight, Schedule) else weight for name, weight in weights.items()}
        edit = {"step": step, "batch_size": at_least(1, "batch_size", batch_size), "weights": described}
        content = {**self._content, "sources": known, "edits": [*self._content["edits"], edit]}
        tried = type(self)(self.path, content, views, self._places, self._trusted)
        tried.mixture()
        return content, tried._views

    def _write(self, content: JsonObject, views: dict[str, View]) -> None:
        self._store.put(self._key, to_json({"format": FORMAT, "format_version": FORMAT_VERSION, **content}))
        self._content, self._views = content, views

    def _source(self, name: str) -> JsonObject:
        for source in self._content["sources"]:
            if source["name"] == name:
                return dict(source)
        raise ValueError(f"{self.path}: there is no source {name!r}; there are {', '.join(map(repr, self.names))}")

    def _edits(self) -> list[Edit]:
        numbers = {name: k for k, name in enumerate(self.names)}
        edits: list[Edit] = []
        for edit in self._content["edits"]:
            weights = {
                numbers[name]: Schedule(given["points"], given["by"], given["kind"]) if isinstance(given, dict) else given
                for name, given in edit["weights"].items()
            }
            check_weights({self.names[k]: weight for k, weight in weights.items()})
            at_least(edits[-1].step if edits else 0, "step", edit["step"])
            edits.append(Edit(edit["step"], at_least(1, "batch_size", edit["batch_size"]), dict(sorted(weights.items()))))
        return edits


def _as_json_holds(weight: Any) -> Any:
    """A weight as a Python number, since JSON has no numbers of numpy. Anything else is returned as it is, and refused later by
    name.
    """
    return float(weight) if is_weight(weight) and not isinstance(weight, int | float | Schedule) else weight


def _described(name: str, view: View, epochs: int | None) -> JsonObject:
    """A source for JSON: enough to open its view again, and to tell whether it is the same."""
    if not isinstance(name, str):
        raise TypeError(f"a source's name is text, but here it is {name!r}")
    source: JsonObject = {"name": name, "rows": len(view), "epochs": checked_epochs(name, epochs)}
    if isinstance(view, SplitView):
        # through JSON, so that what was read and what is made now can be compared
        source["view"] = json.loads(json.dumps(view.described()))
        tokens, content = view.tokens, None
        store, split = dataset_of(tokens.store), posixpath.basename(tokens.store.root)
        with contextlib.suppress(FileNotFoundError):  # another writer's dataset: its counts must do
            content = digest_below(store, f"{split}/")
        counts = {"token_count": tokens.token_count, "seq_count": tokens.seq_count}
        source["dataset"] = {"path": store.url, "split": split, "content": content, **counts}
    return source
