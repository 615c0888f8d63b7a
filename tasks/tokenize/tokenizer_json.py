"""Engines of a tokenizer.json: Hugging Face tokenizers, and gigatoken."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from flat_tokens.tokenizers import TokenizerJson
from tasks.tokenize.engines import Encode, Tokenizer, Tokens, concatenate, gigatoken_encode


def json_tokenizer(of: TokenizerJson) -> Tokenizer:
    """ValueError where its tokens are random."""
    definition, tokenizer = of.definition, of.tokenizer
    if (definition.get("model") or {}).get("dropout"):
        raise ValueError(f"{of.name}: the model has dropout {definition['model']['dropout']}, so its tokens are random")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(texts: pa.LargeStringArray) -> Tokens:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return concatenate(np.array(encoding.ids, np.uint32) for encoding in encodings)

    # The fast engine would take a special token's text for the token: it does not get to know them.
    plain = {
        **definition,
        "added_tokens": [token for token in definition.get("added_tokens") or [] if not token.get("special")],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }

    def make_fast() -> Encode:
        import gigatoken  # slow to import, and not of use to every build

        return gigatoken_encode(gigatoken.Tokenizer.from_json(json.dumps(plain)))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Tokenizer(of.name, of.digest, highest, encode, make_fast, decode, of.revision)
