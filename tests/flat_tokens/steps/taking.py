"""Steps as a build takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flat_tokens.steps import ReadySteps, StepsOutcome, open_steps


def taken(steps: Sequence[dict[str, Any]] | ReadySteps, *texts: str, columns: pa.RecordBatch | None = None) -> StepsOutcome:
    """What steps make of documents, whose keys are their numbers."""
    opened = steps if isinstance(steps, ReadySteps) else open_steps(steps)
    return opened(pa.array(texts, pa.large_string()), np.arange(len(texts), dtype=np.uint64), columns)
