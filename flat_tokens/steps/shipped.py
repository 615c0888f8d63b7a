"""The steps ``length``, ``pattern`` and ``normalize``: Arrow's own functions, in time that grows with the text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flat_tokens.extras import pa
from flat_tokens.steps.contract import Outcome

UNITS = ("bytes", "characters", "lines")


class Length:
    """Keeps documents that are neither too short nor too long. A line ends with a newline or with the text."""

    version = "1"

    def __init__(
        self,
        *,
        min_bytes: int | None = None,
        max_bytes: int | None = None,
        min_characters: int | None = None,
        max_characters: int | None = None,
        min_lines: int | None = None,
        max_lines: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} should be a whole number, 0 or more")
        for unit in UNITS:
            if given.get(f"min_{unit}", 0) > given.get(f"max_{unit}", 1 << 62):
                raise ValueError(f"min_{unit} is larger than max_{unit}: no document would stay")
        if not given:
            raise ValueError(f"it needs a limit: {', '.join(f'{side}_{unit}' for unit in UNITS for side in ('min', 'max'))}")
        self._limits = given

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        texts = documents.column("text")
        keep = np.ones(len(texts), bool)
        reasons = np.full(len(texts), None, object)
        lengths = {unit: COUNT[unit](texts) for unit in UNITS if {f"min_{unit}", f"max_{unit}"} & self._limits.keys()}
        for name, limit in self._limits.items():
            side, _, unit = name.partition("_")
            of = np.asarray(lengths[unit])
            out = keep & ((of < limit) if side == "min" else (of > limit))
            reasons[out] = name
            keep &= ~out
        return Outcome(keep, pa.array(reasons, pa.string()))


def _lines(texts: pa.LargeStringArray) -> pa.Array:
    ended = pa.compute.count_substring(texts, "\n")
    # What stands after the last end is a line, too.
    open_at_end = pa.compute.invert(pa.compute.or_(pa.compute.ends_with(texts, "\n"), pa.compute.equal(texts, "")))
    return pa.compute.add(ended, open_at_end.cast(ended.type))


COUNT: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda texts: pa.compute.binary_length(texts),
    "characters": lambda texts: pa.compute.utf8_length(texts),
    "lines": _lines,
}


class Pattern:
    """Keeps the documents in which a regular expression of RE2's is found, or drops them."""

    version = "1"

    def __init__(self, *, keep: str | None = None, drop: str | None = None, ignore_case: bool = False) -> None:
        if (not keep) == (not drop):
            raise ValueError("it needs keep or drop, one of them: a regular expression")
        self._pattern, self._keeps = (keep, True) if keep else (drop, False)
        if not isinstance(self._pattern, str) or not isinstance(ignore_case, bool):
            raise ValueError("keep and drop are regular expressions, ignore_case is true or false")
        self._ignore_case = ignore_case
        try:
            self._found(pa.array([""], pa.large_string()))
        except pa.ArrowInvalid as error:
            raise ValueError(f"{self._pattern!r} is not a regular expression of RE2: {error}") from error

    def _found(self, texts: pa.LargeStringArray) -> pa.BooleanArray:
        return pa.compute.match_substring_regex(texts, self._pattern, ignore_case=self._ignore_case)

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        found = self._found(documents.column("text"))
        return Outcome(found, "keep") if self._keeps else Outcome(pa.compute.invert(found), "drop")


class Normalize:
    """Gives texts in Unicode's normal form NFC, and newlines for the line ends CR LF and CR."""

    version = "1"

    def __init__(self, *, nfc: bool = True, line_ends: bool = True) -> None:
        if not isinstance(nfc, bool) or not isinstance(line_ends, bool):
            raise ValueError("nfc and line_ends are true or false")
        if not (nfc or line_ends):
            raise ValueError("nfc and line_ends are both false: it would do nothing")
        # Before 26, pyarrow took characters apart for NFC, and did not put them together again.
        if nfc and _nfc(pa.array(["e\u0301"], pa.large_string()))[0].as_py() != "\u00e9":
            raise ValueError(f"pyarrow {pa.__version__} gives no NFC: install 26 or newer, or set nfc to false")
        self._nfc, self._line_ends = nfc, line_ends

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        texts = documents.column("text")
        if self._line_ends:
            texts = pa.compute.replace_substring(pa.compute.replace_substring(texts, "\r\n", "\n"), "\r", "\n")
        if self._nfc:
            texts = _nfc(texts)
        return Outcome(text=texts)


def _nfc(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    return pa.compute.utf8_normalize(texts, form="NFC")
