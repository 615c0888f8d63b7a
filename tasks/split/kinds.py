"""The kinds of a dataset's kept columns, which its shards have to agree on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flat_tokens.columns import common
from tasks.split.spans import ShardPlace


class Kinds:
    """The kinds of *columns* in the shards so far. *files*: names of the files, by their numbers. ``found``: by column."""

    def __init__(self, columns: Sequence[str], files: Sequence[str]) -> None:
        self.found, self._files = dict.fromkeys(columns, "null"), files
        self._of: dict[str, int] = {}  # the file that a column's kind is of

    def of_places(self, places: Iterable[ShardPlace]) -> Iterator[ShardPlace]:
        """The places as they come. ValueError, naming two files, where a column is of kinds that do not go together."""
        for at in places:
            for name, kind in at.shard.columns.items():
                fits = common(self.found[name], kind)
                if fits is None:
                    raise ValueError(
                        f"column {name!r} is {self.found[name]} in {self._files[self._of[name]]} and {kind} in "
                        f"{self._files[at.file]}. Mend one of them, or leave the column out of source.keep_columns."
                    )
                if fits != self.found[name]:
                    self.found[name], self._of[name] = fits, at.file
            yield at
