"""The step ``language``: the language of each document by py3langid, whose model is in its package, as a column."""

from __future__ import annotations

import importlib.metadata
import io
import lzma
from array import array
from collections.abc import Sequence

import numpy as np

from flat_tokens.extras import extra, pa
from flat_tokens.steps.contract import Outcome

LETTER = r"\p{L}"


class Language:
    """Writes the ISO 639-1 code of a document's language to a *column*, and how probable it is, 0 to 1, to the column
    *probability*, if that is named; nulls for a text without letters. *keep*: the codes of the documents that stay.
    *max_characters*: only the beginning of a text is looked at, as the time grows with it.
    """

    def __init__(
        self,
        *,
        column: str = "language",
        probability: str | None = None,
        keep: Sequence[str] | None = None,
        max_characters: int = 1000,
    ) -> None:
        langid = extra("py3langid.langid", "the step language")
        # As the package loads it, but in memory: it unpacks 68 MB to the temporary directory in each process.
        with lzma.open(langid.MODEL_DIR / langid.MODEL_FILE) as packed, np.load(io.BytesIO(packed.read())) as model:
            numbers = [array(model[name].dtype.char, model[name].tobytes()) for name in ("nextmove", "nextmove_row")]
            names, features = model["classes"].tolist(), model["out_feat"].tolist()
            self._identifier = langid.LanguageIdentifier(
                model["ptc"], model["pc"], names, numbers[0], features, probability is not None, tk_row=numbers[1]
            )
        self.most_reasons = len(names) + 1  # and unknown
        self.version = f"py3langid {importlib.metadata.version('py3langid')}"
        self.gives_columns = (column,) if probability is None else (column, probability)
        if probability == column:
            raise ValueError(f"column and probability are both {column!r}")
        if type(max_characters) is not int or max_characters < 1:
            raise ValueError("max_characters should be a whole number above 0")
        if keep is not None:
            known = sorted(self._identifier.labels)
            if isinstance(keep, str) or not keep:
                raise ValueError("keep should be a list of languages, such as [en, de]")
            if unknown := [code for code in keep if code not in known]:
                raise ValueError(f"keep has {unknown[0]!r}; languages are {', '.join(known)}")
        self._keep, self._length = keep, max_characters

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        texts = pa.compute.utf8_slice_codeunits(documents.column("text"), 0, self._length)
        has_letters = np.asarray(pa.compute.match_substring_regex(texts, LETTER))
        classify = self._identifier.classify
        nothing = (None, None)
        both = [classify(text) if some else nothing for text, some in zip(texts.to_pylist(), has_letters, strict=True)]
        found = pa.array([code for code, _ in both], pa.large_string())
        columns = (found, pa.array([probability for _, probability in both], pa.float64()))
        keep = None if self._keep is None else pa.compute.is_in(found, pa.array(self._keep, pa.large_string()))
        reason = None if keep is None else pa.compute.coalesce(found, pa.scalar("unknown", pa.large_string()))
        return Outcome(keep, reason, columns=dict(zip(self.gives_columns, columns, strict=False)))
