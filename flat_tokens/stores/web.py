"""The answers of fsspec's stores at http, which are bounded."""

from __future__ import annotations

import re

import aiohttp

from flat_tokens.stores import answers


class Answer(aiohttp.ClientResponse):
    """An answer of aiohttp."""

    async def read(self) -> bytes:
        """The bytes that were asked for, also if the server sends the complete object. ValueError if there are more."""
        if self._body is not None:
            return self._body
        answers.check_encoding(self.url, self.headers)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.request_info.headers.get("Range", ""))
        begin, end = asked.groups() if asked else ("", "")
        first, is_whole = int(begin or 0), self.status != 206
        wanted = int(end) - first + bool(begin) if end else answers.MOST_BYTES
        before = first if is_whole else 0
        found, pace = bytearray(), answers.AnswerPace()
        try:
            async for block in self.content.iter_any():
                pace.add(len(block))
                found += block
                if is_whole and end and not begin:
                    del found[:-wanted]
                elif len(found) > before + wanted:
                    if not is_whole or not end:
                        raise ValueError(f"{self.url}: the server sends more than the {wanted:,} bytes that were asked for")
                    self.close()
                    break
        except BaseException:
            self.close()
            raise
        self._body = bytes(found[before : before + wanted])
        return self._body
