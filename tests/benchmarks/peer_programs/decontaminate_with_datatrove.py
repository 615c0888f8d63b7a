"""datatrove's filter of n-grams: the documents of Parquet files that have 13 words of a question in a row.

The hashes of the questions are made as its indexer makes them, which itself wants a package for the tasks that it downloads.
Words are those of its tokenizer for English, spaCy's, or with ``spaces`` what is between spaces, the fastest it can be given.

    decontaminate_with_datatrove.py TEXT_DIRECTORY QUESTIONS OUTPUT spacy|spaces
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, ngrams
from datatrove.utils.text import simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer


class Spaces(WordTokenizer):
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return []


if __name__ == "__main__":
    directory, questions, output, words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as index:
        filters = NGramsDecontFilter(index, NGramsDecontConfig(n_grams=13), language=Spaces() if words == "spaces" else "eng")
        hashes = set()
        for line in Path(questions).read_text("utf-8").splitlines():
            found = filters.tokenizer.word_tokenize(simplify_text(json.loads(line)["text"]))
            hashes |= {filters.hash_func(" ".join(gram)) for gram in ngrams(found, 13)}
        np.array(sorted(hashes), "<u8").tofile(f"{index}/exam.index.hashes")
        removed = []
        for path in sorted(Path(directory).glob("*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(columns=["id", "text"]):
                for identity, text in zip(batch.column("id").to_pylist(), batch.column("text").to_pylist(), strict=True):
                    if filters.filter(Document(text=text, id=identity)) is not True:
                        removed.append(identity)
    Path(output).write_text(json.dumps(removed), "utf-8")
