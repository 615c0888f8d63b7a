"""Open the dataset that a build made, and show two of its documents as text: ``read_back.py OUTPUT``."""

import sys
from pathlib import Path

from tokenizers import Tokenizer

import flat_tokens

dataset = flat_tokens.open(sys.argv[1])
tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
checked = flat_tokens.verify(sys.argv[1], "full")

print(f"\n{dataset.path}: {checked.object_count} objects and {checked.token_count:,} tokens checked, every one right")
for name, split, i in (("train", dataset.train, 3), ("validation", dataset.validation, 0)):
    tokens = split.sequence(i)
    print(f"\n--- {name}, sequence {i} of {split.seq_count}: {len(tokens)} tokens {tokens[:8].tolist()}...\n")
    print(tokenizer.decode(tokens.tolist(), skip_special_tokens=False)[:600])
