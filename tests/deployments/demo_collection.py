"""Write the demonstration collection: ``stories.parquet``, ``notes.jsonl`` and the ``tokenizer.json`` trained on both.

    python -m tests.deployments.demo_collection

``texts/<language>.txt`` holds documents: a line ``%%`` starts a note and a line ``%% Title`` a story. ``texts/exact.json`` holds
those in which every byte of white space matters.
The result depends on these texts and the versions of pyarrow and tokenizers only, never on chance or the clock.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DEMO = Path(__file__).resolve().parents[2] / "deployments/demo"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 4096


class Document(NamedTuple):
    """A text without its id; a story has a title, a note has none."""

    language: str
    title: str | None
    text: str


EXACT = [Document(**one) for one in json.loads((DEMO / "texts" / "exact.json").read_text("utf-8"))]
"""Documents in which every byte of white space matters: with carriage returns, tabs, code, combining characters, joined emoji
and the marker as text.
"""


def all_documents() -> list[Document]:
    """Every document, mixed in an order that depends on the texts only."""
    documents = list(EXACT)
    for path in sorted(DEMO.glob("texts/*.txt")):
        language = re.split(r"[_.]", path.name)[0]
        for block in re.split(r"^%%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            title, text = block.split("\n", 1)
            documents.append(Document(language, title.strip() or None, text.strip("\n")))
    return sorted(documents, key=lambda document: hashlib.sha256(document.text.encode()).digest())


def write_stories(documents: list[Document], path: Path) -> None:
    """Write the documents that have a title as Parquet."""
    stories = [document for document in documents if document.title is not None]
    columns = {"id": [f"story-{n:04d}" for n in range(1, len(stories) + 1)]}
    columns |= {name: [getattr(story, name) for story in stories] for name in ("text", "language", "title")}
    table = pa.table(columns, pa.schema([(name, pa.string()) for name in columns]))
    pq.write_table(table, path, compression="zstd", row_group_size=64)


def write_notes(documents: list[Document], path: Path) -> None:
    """Write the documents that have no title as JSON lines."""
    notes = [document for document in documents if document.title is None]
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for n, note in enumerate(notes, 1):
            record = {"id": f"note-{n:04d}", "text": note.text, "language": note.language}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Train a byte-level BPE, pre-tokenized as in GPT-2, on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def write_collection(directory: Path) -> None:
    """Write the three files into a directory."""
    documents = all_documents()
    write_stories(documents, directory / "stories.parquet")
    write_notes(documents, directory / "notes.jsonl")
    (directory / "tokenizer.json").write_text(train_tokenizer(documents).to_str(pretty=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_collection(DEMO)
