"""The split rule: which documents are validation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flat_tokens.keys import A, mix
from tasks.models import Model, Split


class SplitRule(Model):
    """A document is validation if a hash of its key and the seed is below the fraction. It depends on the document alone, not
    on the tokenizer, the number of workers or the rest of the dataset.
    """

    fraction: float
    seed: int

    def draws(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which documents are validation: bool[n]."""
        if self.fraction >= 1:
            return np.ones(len(keys), bool)
        salt = mix(np.array([self.seed], np.uint64) * A + A)
        return mix(keys ^ salt) < np.uint64(int(self.fraction * 2**64))


def chosen(split: Split, all_in: Split | None, rule: SplitRule, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which documents of a shard belong to *split*: bool[n]."""
    if all_in is not None:
        return np.full(len(keys), all_in == split)
    drawn = rule.draws(keys)
    return drawn if split == "validation" else ~drawn
