"""Tokenizers.

Each engine by itself, on one thread, in batches of some 4 MB of text: `fast`, which builds use where it is known to give the
reference engine's tokens, and `reference` (tiktoken for an encoding, tokenizers for a `tokenizer.json`), which may use more
threads of its own. Loading is not counted. The first pass is counted apart, for the fast engine remembers words. `used`: the
engine that a build of this text uses, for both give the same tokens of its first documents and of a list of awkward texts.
`same`: whether they do so of all of it. Hub repositories cannot be had everywhere: those of Llama 3's and Qwen's kind have the
tokens and merges of `cl100k_base` with their own patterns, Qwen's behind NFC; the one of SentencePiece's kind (a space is `▁`,
other characters fall back to bytes, as in Llama 2) is trained on a part of the text.
"""

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Encode, Tokens, may_use_fast_engine
from tasks.tokenize.tokenizers import load_tokenizer
from tests.benchmarks import vocabularies
from tests.benchmarks.bench import Bench, Grid
from tests.benchmarks.corpus import Corpus

PACKAGES = ("gigatoken", "tiktoken", "tokenizers", "awkward")
ENCODINGS = ("gpt2", "r50k_base", "cl100k_base", "o200k_base")
TEXT_BYTES = 40_000_000


def texts_of(corpus: Corpus, wanted: int) -> list[pa.LargeStringArray]:
    """About *wanted* bytes of text, an array for each row group."""
    found, size = list[pa.LargeStringArray](), 0
    for path in corpus.paths:
        file = pq.ParquetFile(path)
        for number in range(file.num_row_groups):
            if size >= wanted:
                return found
            column = file.read_row_group(number, columns=["text"]).column(0).cast(pa.large_string()).combine_chunks()
            found.append(column)
            size += column.nbytes
    return found


def timed(encode: Encode, texts: Sequence[pa.LargeStringArray], passes: int) -> tuple[list[float], list[Tokens]]:
    """Seconds of each pass over all texts, and the tokens of the last, in arrays of their own."""
    times = []
    for _ in range(passes):
        seconds, tokens = 0.0, []
        for batch in texts:
            begin = time.perf_counter()
            found = encode(batch)
            seconds += time.perf_counter() - begin
            tokens.append(Tokens(found.ids.copy(), np.array(found.offsets)))
        times.append(seconds)
    return times, tokens


def measure(bench: Bench) -> list[Grid]:
    texts = texts_of(bench.corpus, bench.size(TEXT_BYTES, 1_000_000))
    size = sum(batch.nbytes for batch in texts) / 1e6
    json_file = bench.vocabulary / "tokenizer.json"
    names = {name: name for name in ("bytes", *bench.size(ENCODINGS, ENCODINGS[:1]))} | (
        {str(json_file): "gpt2's `tokenizer.json`"} if json_file.exists() else {}
    )
    if not bench.quick:
        some = (text for batch in texts_of(bench.corpus, vocabularies.TRAINED_BYTES) for text in batch.to_pylist())
        names |= {str(path): kind for kind, path in vocabularies.write_all(bench.fresh("vocabularies"), some).items()}
    rows = []
    for name, shown in names.items():
        tokenizer = load_tokenizer(TokenizerConfig(name=name))
        slow, expected = timed(tokenizer.reference, texts, bench.times)
        reference = min(slow)
        speeds = ["–", "–", "–", "–"]
        if tokenizer.make_fast is not None:
            fast, tokens = timed(tokenizer.make_fast(), texts, 1 + bench.times)
            best = min(fast)
            pairs = zip(tokens, expected, strict=True)
            same = all(np.array_equal(a.ids, b.ids) and np.array_equal(a.offsets, b.offsets) for a, b in pairs)
            speeds = [f"{size / fast[0]:,.1f}", f"{size / best:,.1f}", f"{reference / best:.1f} times", "yes" if same else "no"]
        samples = [text for batch in texts[:1] for text in batch[:64].to_pylist()]
        used = "fast" if may_use_fast_engine(tokenizer, "auto", samples) else "reference"
        count = sum(len(one.ids) for one in expected)
        rows.append([shown, used, f"{count:,}", f"{size * 1e6 / count:.2f}", f"{size / reference:,.1f}", *speeds])
    header = [
        "tokenizer",
        "used",
        "tokens",
        "bytes of text a token",
        "reference, MB/s",
        "fast, first pass, MB/s",
        "fast, best, MB/s",
    ]
    return [Grid([*header, "fast / reference", "same"], rows, f"{size:,.0f} MB of text.")]
