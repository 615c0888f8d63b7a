"""torchtitan's data loader: batches of this library as its trainer takes them, resumed at any data-parallel degree.

``config.dataloader = Config(batches=...)`` takes the place of GrainDataLoader.Config`` does. torchtitan is not imported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flat_tokens.extras import extra
from flat_tokens.options import at_least
from flat_tokens.rows.loader import ByStep, Steps
from flat_tokens.rows.views import IGNORED_LABEL

STATE_VERSION = 1


@dataclass(kw_only=True)
class Config:
    """The configuration of a `DataLoader`, which torchtitan's trainer builds.

    ``batches(length, batch_size, start)`` makes the loader or mixture of the run: rows of *length* tokens, packed or packed
    documents, one more than the trainer's context, for the last is only a label; *batch_size* of them on all ranks together;
    from sample *start* on. The mixture of a ledger has its own batch sizes and knows its past: it needs neither of the last two.
    *prefetch*: batches that are loaded ahead.
    """

    batches: Callable[[int, int, int], ByStep]
    prefetch: int = 2

    def build(self, **runtime: Any) -> DataLoader:
        return DataLoader(self, **runtime)

    def to_dict(self) -> dict[str, Any]:
        """For the log of the run."""
        made_by = f"{getattr(self.batches, '__module__', '')}:{getattr(self.batches, '__qualname__', repr(self.batches))}"
        return {"batches": made_by, "prefetch": self.prefetch}


class DataLoader:
    """Batches ``({"input", "positions"}, labels)`` of one data-parallel rank: int64[num_tokens_per_batch] each, row after
    row; for torchtitan 0.3.0, which says ``local_batch_size``, int64[local_batch_size, context].

    Labels are -100 in padding, where the loss mask is 0, and where a document would predict the first token of another. Positions
    begin with 0 at each document, also at a rest of one, and at a row's first token. The state is the number of samples that all
    ranks have had together, the same on every rank. So a run goes on with any number of ranks and any local batch size, on the
    same samples.

    ValueError for a loader whose rows or batches are not what the trainer asks for.
    """

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        snapshot_every_n_steps: int | None = None,  # a state costs nothing here
        **unknown: Any,
    ) -> None:
        sizes = (seq_len, local_batch_size, max_context_length, num_tokens_per_batch)
        self._is_flat = num_tokens_per_batch is not None
        context, count = sizes[2:] if self._is_flat else sizes[:2]
        if unknown or context is None or count is None or sizes.count(None) != 2:
            raise TypeError(
                f"the trainer says seq_len, local_batch_size, max_context_length, num_tokens_per_batch = {sizes}"
                f"{''.join(f', {name} = {value!r}' for name, value in unknown.items())}. This loader knows the first two alone, "
                "of torchtitan 0.3.0, or the other two alone, of its main branch in August 2026: use one of these."
            )
        self._context, self._config = at_least(1, "the context", context), config
        rows, rest = divmod(count, context) if self._is_flat else (count, 0)
        if rest:
            raise ValueError(
                f"num_tokens_per_batch is {count}, which is not a multiple of max_context_length, {context}. "
                f"Set it to {count - rest or context}."
            )
        self._rows = at_least(1, "rows of a batch", rows)
        self._rank, self._ranks = dp_rank, at_least(1, "dp_world_size", dp_world_size)
        self._steps = self._from(0)

    def _from(self, position: int) -> Steps:
        """The batches from a sample on. ValueError if there is no step that begins there."""
        loader = self._config.batches(self._context + 1, self._rows * self._ranks, position)
        step = 0
        if loader.position(0) != position:
            # Positions of steps increase, by a sample at least.
            last = position if loader._step_count is None else min(loader._step_count, position)
            step = bisect_left(range(last), position, key=loader.position)
            if loader.position(step) != position:
                raise ValueError(
                    f"no step of the loader begins at sample {position}, where the run was stopped. Let batches(length, "
                    "batch_size, start) begin at start, or take the batch size that the run had."
                )
        return loader.shard(self._rank, self._ranks).steps(step, prefetch=self._config.prefetch)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        return self

    def __next__(self) -> tuple[dict[str, Any], Any]:
        """Inputs, positions and labels of the next batch, as the trainer takes them. ValueError if it has another shape."""
        rows = next(self._steps)
        rows = getattr(rows, "samples", rows)
        torch = extra("torch", "torchtitan's data loader")
        packed = hasattr(rows, "document_ids")
        tokens = torch.as_tensor(rows.tokens if packed else rows.targets).long()
        if tuple(tokens.shape) != (self._rows, self._context + 1):
            raise ValueError(
                f"a batch has {tokens.shape[0]} rows of {tokens.shape[1]} tokens here, but the trainer takes {self._rows} of "
                f"{self._context + 1}, its context and a last label. Make the loader of the length and batch size that "
                "batches(length, batch_size, start) is given, and without a smaller last batch (epochs=None or drop_last)."
            )
        labels = torch.as_tensor(rows.labels).long() if packed or hasattr(rows, "labels") else tokens
        others = torch.as_tensor(rows.document_ids[:, 1:] != rows.document_ids[:, :-1] if packed else rows.is_seq_start[:, 1:])
        # A pack's own positions go on within documents, up to the context and one more: those of the trainer are below it.
        places = torch.arange(self._context, device=tokens.device)
        first = torch.nn.functional.pad(others[:, :-1], (1, 0))
        positions = places - torch.cummax(places * first, -1).values
        inputs, labels = tokens[:, :-1].contiguous(), torch.where(others, IGNORED_LABEL, labels[:, 1:])
        if self._is_flat:
            inputs, positions, labels = inputs.flatten(), positions.flatten(), labels.flatten()
        return {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        loader = self._steps._loader
        return {"version": STATE_VERSION, "position": loader.position(self._steps.step), **loader.versions()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of any rank. An empty one changes nothing, as torchtitan has it."""
        if not state:
            return
        if (version := state.get("version")) != STATE_VERSION:
            raise ValueError(
                f"the state has version {version!r}, but this is version {STATE_VERSION}: it is of another data loader"
            )
        steps = self._from(state["position"])
        try:
            steps._loader.check_versions(state)
        except ValueError:
            steps.close()
            raise
        self.close()
        self._steps = steps

    def close(self) -> None:
        """End the threads that load ahead."""
        self._steps.close()
