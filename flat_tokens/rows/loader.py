"""Batches by step: which rows a step has follows from its number alone, so a run can go on from any step.

All samples of a run stand in one line, the *stream*: epoch 0's, then epoch 1's and so on. Batch ``step`` is positions
``start + step * batch_size`` up to ``+ batch_size`` of it, across the ends of epochs. Loaders have no state: the progress
of a run is the step, or the position in the stream, which does not depend on batch size and number of hosts.
"""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex

from flat_tokens.rows.order import Indices, ReferenceOrder, at_least, checked_seed, stream_of
from flat_tokens.rows.steps import ByStep, View


class ShuffledLoader(ByStep):
    """Batches of one view: ``loader[step]`` is ``view.batch(loader.indices(step))``, and needs nothing but the step.

    *order* ``"shuffled"`` is a permutation of all rows, another in each epoch, which takes no memory; ``"sequential"``
    is rows 0, 1, 2 ...; a `ReferenceOrder` gives the batches of the reference loader. With *epochs* None it never ends.
    *start* is the number of samples that a run has already had, *start_token* the same in tokens.

    Only the last batch of a run may have fewer than *batch_size* rows. *drop_last* drops it; None does so in the
    reference order alone, as the reference does. That order also has only whole read blocks, evenly dealt to its
    streams. ``left_out`` is how many rows of the view are in no batch.

    ValueError for an empty view, for a run too short for a single step, and, in the reference order, where *batch_size*
    or *start* are not multiples of its streams or the view is smaller than a read block a stream. Loaders can be pickled,
    survive a fork, and may be used by many threads.
    """

    def __init__(
        self,
        view: View,
        batch_size: int,
        seed: int = 0,
        *,
        epochs: int | None = 1,
        drop_last: bool | None = None,
        start: int = 0,
        start_token: int | None = None,
        order: Literal["shuffled", "sequential"] | ReferenceOrder = "shuffled",
    ) -> None:
        if len(view) == 0:
            raise ValueError("the view has no rows: there is nothing to load")
        self.view, self.seed, self.order = view, checked_seed(seed), order
        self.epochs = epochs if epochs is None else at_least(1, "epochs", epochs)
        self._stream = stream_of(order, len(view), self.seed)
        self.drop_last = isinstance(order, ReferenceOrder) if drop_last is None else drop_last
        total = None if self.epochs is None else self.epochs * self._stream.epoch_length
        super().__init__(view, batch_size, start, start_token, total=total, drop_last=self.drop_last)
        for name, value in (("batch_size", self.batch_size), ("start", self.start)):
            if value % self._stream.granularity:
                raise ValueError(f"{name} {value} does not divide evenly among {self._stream.granularity} streams")
        if self.drop_last and total is not None and total < self.batch_size:
            raise ValueError(
                f"there are {total} samples in all, fewer than one batch of {self.batch_size}, and drop_last leaves them out. "
                "Take smaller batches or more epochs."
            )

    def __repr__(self) -> str:
        steps = "endless steps" if self._step_count is None else f"{self._step_count:,} steps"
        return f"<ShuffledLoader: {steps} of {self.batch_size:,} rows of {self.view!r}>"

    @property
    def epoch_length(self) -> int:
        """Number of samples in an epoch: all rows of the view, in the reference order those of whole read blocks."""
        return self._stream.epoch_length

    @property
    def left_out(self) -> int:
        """Rows of the view that are in no epoch (in the reference order, its last ones), and samples of a dropped batch."""
        dropped = (self._total - self.start) % self.batch_size if self.drop_last and self._total is not None else 0
        return len(self.view) - self.epoch_length + dropped

    def indices(self, step: SupportsIndex) -> Indices:
        """The rows of the view in a step on this host: int64[rows]. IndexError if there is no such step."""
        return self._stream.rows(*self._batch_range(step))

    def __getitem__(self, step: SupportsIndex) -> Any:
        """The batch of a step, as the view gives it. IndexError if there is no such step."""
        return self.view.batch(self.indices(step))
