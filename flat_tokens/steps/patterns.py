"""The size of a regular expression's program: matching takes time in proportion to it, and to the text."""

from __future__ import annotations

import re

_PART = re.compile(
    r"(?P<quoted>\\Q.*?(?:\\E|$))|(?P<names>\\[pP](?:\{[^}]*\}|.)|\[\^?\]?(?:\\[pP]\{[^}]*\}|\\.|\[:\^?\w+:\]|[^]\\])*\])"
    r"|(?P<escaped>\\x\{[^}]*\}|\\.)|(?P<open>\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*[:)]))?)|(?P<close>\))|(?P<count>\{([0-9]+)(?:,([0-9]*))?\})"
    r"|(?P<often>[*+?])|(?P<any>\.)|(?P<plain>.)",
    re.DOTALL,
)
_MEMBERS = re.compile(r"\\[pPx]\{[^}]*\}|\\.|.", re.DOTALL)
_CLASS, _UNICODE, _MEMBER = 16, 256, 3
"""Instructions of a class, about: of ASCII or all but that, of Unicode by its properties, and for each member of such a one."""


def program_size(pattern: str) -> int:
    """About how many instructions an expression of RE2's compiles to, rather too many than too few."""
    levels, last = [0], 0  # of each open group the size so far; the size of what a repetition would repeat
    for part in _PART.finditer(pattern):
        kind, text = str(part.lastgroup), part[0]
        if kind == "open":
            if not text.endswith(")"):  # else flags for the rest
                levels.append(0)
            last = 0
            continue
        if kind == "close":
            last = 2 + levels.pop() if len(levels) > 1 else 1
        elif part["count"] is not None:
            most = max(int(number) for number in re.findall("[0-9]{1,9}", text))
            levels[-1] += last * max(most, 1) + most
            last = last * (most + 1)
            continue
        elif kind == "often":
            levels[-1] += 1
            last += 1
            continue
        elif kind == "names":
            members = len(_MEMBERS.findall(text))
            is_wide = re.search(r"\\[pPx]|[^\x00-\x7f]", text)
            last = _UNICODE + _MEMBER * members if is_wide else max(_CLASS, members)
        elif kind == "escaped" and text[1:] in "WDS":
            last = _CLASS
        else:
            last = 2 * len(text.encode("utf-8", "replace")) if kind in ("quoted", "plain") else 8
        levels[-1] += last
    return sum(levels) + 4
