"""Token sequences in memory, as the format stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np

from flat_tokens.annotations import AnyArray, Integers, UInt8s, UInt32s, UInt64s

MAX_TOKEN_ID = 2**31 - 1
"""The largest token id that the format holds: ``id * 2 + 1`` must fit an unsigned 32-bit integer."""


TOKENS, LOSS_MASK = "encoded_tokens", "loss_mask"
TokenArrays = Mapping[str, AnyArray]
"""Items of token arrays, by the arrays' names."""


class TokenArray(NamedTuple):
    """An array with an item a token: its type, and the item of all tokens if the array is not there."""

    dtype: Literal["uint32", "uint8"]
    absent: int = 0

    def all_absent(self, count: int) -> AnyArray:
        """The items of tokens of which nothing is known: dtype[count]."""
        return np.full(count, self.absent, self.dtype)


TOKEN_ARRAYS: dict[str, TokenArray] = {TOKENS: TokenArray("uint32"), LOSS_MASK: TokenArray("uint8", absent=1)}
"""Arrays that a split may have with an item a token: its tokens, and which of them count for the loss. All but the tokens are
named by an attribute of the split that has them. Writers and readers of tokens handle all alike.
"""


class TokenBatch(NamedTuple):
    """Sequences of tokens, one after another.

    ``encoded_tokens``: uint32[token_count], ``id * 2 + 1`` where the token starts a sequence, ``id * 2`` elsewhere.
    ``seq_starts``: uint64[seq_count + 1], the index of each sequence's first token; the last entry is token_count.
    An empty sequence repeats an entry of ``seq_starts`` and marks no token: ``seq_starts`` is the truth.
    ``max_token_id``: the largest id, 0 if there is no token.
    ``loss_mask``: uint8[token_count], 1 where the token counts for the loss, else 0; None: all count.
    """

    encoded_tokens: UInt32s
    seq_starts: UInt64s
    max_token_id: int
    loss_mask: UInt8s | None = None

    @classmethod
    def from_sequences(cls, sequences: Iterable[Sequence[int] | Integers]) -> Self:
        """Encode sequences of token ids. ValueError for an id outside 0 to 2**31 - 1."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        for ids in arrays:
            if len(ids) and ids.dtype.kind not in "iu":  # a value without an integer type in numpy is a fraction or far too large
                raise ValueError(f"token ids are integers from 0 to {MAX_TOKEN_ID}, but a sequence holds {ids.dtype}")
        # Above 2**63 - 1 they turn negative, which is refused as well.
        tokens = np.concatenate([*(ids.astype(np.int64) for ids in arrays), np.empty(0, np.int64)])
        if len(tokens) and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
            raise ValueError(f"token ids run from {tokens.min()} to {tokens.max()}, but the format holds 0 to {MAX_TOKEN_ID}")
        seq_starts = np.zeros(len(arrays) + 1, np.uint64)
        np.cumsum([len(array) for array in arrays], out=seq_starts[1:], dtype=np.uint64)
        return cls.from_flat(tokens.astype(np.uint32), seq_starts)

    @classmethod
    def from_flat(cls, tokens: UInt32s, seq_starts: UInt64s) -> Self:
        """Encode flat token ids **in place** (uint32[n], writable) with their ``seq_starts`` (uint64[m + 1]).

        ValueError for an id above 2**31 - 1, before anything is changed.
        """
        max_token_id = int(tokens.max()) if len(tokens) else 0
        if max_token_id > MAX_TOKEN_ID:
            raise ValueError(f"token id {max_token_id} does not fit the format, which holds 0 to {MAX_TOKEN_ID}")
        np.left_shift(tokens, np.uint32(1), out=tokens)
        # An empty sequence's entry is its neighbour's first token, or the end: only sequences with a token mark one.
        tokens[seq_starts[:-1][seq_starts[1:] > seq_starts[:-1]]] |= np.uint32(1)
        return cls(tokens, seq_starts, max_token_id)

    @classmethod
    def of_arrays(cls, arrays: TokenArrays, seq_starts: UInt64s, max_token_id: int) -> Self:
        """A batch of the items of token arrays."""
        return cls(arrays[TOKENS], seq_starts, max_token_id, arrays.get(LOSS_MASK))

    @property
    def arrays(self) -> TokenArrays:
        """The items of its token arrays, as far as it has them."""
        return {TOKENS: self.encoded_tokens} | ({} if self.loss_mask is None else {LOSS_MASK: self.loss_mask})

    def items(self, name: str) -> AnyArray:
        """The items of a token array: dtype[token_count]."""
        found = self.arrays.get(name)
        return TOKEN_ARRAYS[name].all_absent(self.token_count) if found is None else found

    @property
    def token_count(self) -> int:
        return len(self.encoded_tokens)

    @property
    def seq_count(self) -> int:
        return len(self.seq_starts) - 1

    def sequence(self, i: int) -> UInt32s:
        """Sequence *i*, decoded: uint32[length]."""
        return self.encoded_tokens[int(self.seq_starts[i]) : int(self.seq_starts[i + 1])] >> np.uint32(1)

    def sequences(self) -> list[UInt32s]:
        """Every sequence, decoded."""
        return np.split(self.encoded_tokens >> np.uint32(1), self.seq_starts[1:-1].astype(np.int64)) if self.seq_count else []
