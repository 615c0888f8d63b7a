"""The target: the version under way, and everything that its final objects have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.keys import A, mix
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from tasks.models import Model, Name, Split
from tasks.output.paths import version_key, version_store
from tasks.output.staging import Workspace


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


class Selection(Model):
    """The documents of input datasets that are taken; filters by source are in the parts. ``below``: for each split, documents
    whose hash is below this are in the sample; of those with this hash, each part takes its first ``ties``.
    """

    splits: tuple[Split, ...] = SPLITS
    dropped: Split | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    where: str | None = None
    listed: str | None = Field(
        None, description="Below the staging: sorted keys, and next to them a note of those that were found"
    )
    seed: int = 0
    below: dict[Split, int] | None = None


ALL = Selection()


class Target(Model):
    """The version under way: where this process works, the version's name and layout, which documents go where, whether it has a
    loss mask, and the kinds of the columns that it keeps, as far as they are known before its documents are read.
    """

    workspace: Workspace
    name: Name
    layout: LayoutName
    rule: SplitRule = SplitRule(fraction=0, seed=0)
    selection: Selection = ALL
    masked: bool = False
    columns: dict[str, str] = Field({}, description="By the columns' names")

    @property
    def root(self) -> Store:
        """The output."""
        return self.workspace.root

    @property
    def store(self) -> Store:
        """The version's own store."""
        return version_store(self.root, self.name)

    @property
    def specs(self) -> Layout:
        """The specifications of its arrays."""
        return LAYOUTS[self.layout]

    def selecting(self, selection: Selection) -> Target:
        """The same target with another selection."""
        return self.model_copy(update={"selection": selection})

    def key(self, name: str) -> str:
        """Key below the output of an object of the version."""
        return f"{version_key(self.name)}/{name}"
