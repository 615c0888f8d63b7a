"""Write the demonstration collection: ``stories.parquet``, ``notes.jsonl`` and the ``tokenizer.json`` trained on both.

The texts come from three places. ``texts/<language>.txt`` holds documents that were written one by one: a line
``%%`` starts a note and a line ``%% Title`` a story. ``texts/pools/*.txt`` holds pools of sentences from which short
diary entries are put together (see ``Pool``). ``texts/exact.json`` holds documents in which every byte of white space matters.
The result depends on these texts and the versions of pyarrow and tokenizers only, never on chance or the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 4096


class Document(NamedTuple):
    """A text without its id; a story has a title, a note has none."""

    language: str
    title: str | None
    text: str


EXACT = [Document(**one) for one in json.loads((HERE / "texts" / "exact.json").read_text("utf-8"))]
"""Documents in which every byte of white space matters."""
"""Documents with carriage returns, tabs, code, combining characters, joined emoji and the marker as text."""


class Draw:
    """Numbers that look random and are the same on every machine."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._drawn = 0

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1."""
        digest = hashlib.sha256(f"{self._seed}/{self._drawn}".encode()).digest()
        self._drawn += 1
        return int.from_bytes(digest[:8], "big") % limit


class Pool:
    """Sentence pools: ``[section]`` lines, and below each the alternatives, one on a line.

    ``{@section}`` stands for a line of that section, ``{one|another}`` for one of the alternatives, ``{#3-9}`` for a
    number and ``\\n`` for a line break. A section gives out all its lines before it gives out one of them again.
    In a story, ``{subject}`` and ``{body}`` are the two halves of the line ``subject :: body`` drawn for it.
    """

    def __init__(self, path: Path) -> None:
        self._sections: dict[str, list[str]] = {}
        section = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line:
                self._sections.setdefault(section, []).append(line.replace("\\n", "\n"))
        self._draw = Draw(path.stem)
        self._left: dict[str, list[str]] = {}
        self._story: dict[str, str] = {}

    def documents(self) -> Iterator[Document]:
        """As many documents as the pool's section ``documents`` says."""
        language = self._sections.get("language", ["en"])[0]
        is_story = self._sections["kind"] == ["story"]
        for _ in range(int(self._sections["documents"][0])):
            title = None
            if is_story:
                self._story["subject"], self._story["body"] = self._line("subject").split(" :: ")
                title = self._line("title")
            yield Document(language, title, self._line("document"))

    def _line(self, section: str) -> str:
        left = self._left.setdefault(section, [])
        if not left:
            left.extend(self._sections[section])
        line = left.pop(self._draw.below(len(left)))
        return re.sub(r"\{([^{}]+)\}", self._slot, line)

    def _slot(self, match: re.Match[str]) -> str:
        slot = match[1]
        if slot in self._story:
            return self._story[slot]
        if slot.startswith("@"):
            return self._line(slot[1:])
        if slot.startswith("#"):
            low, high = map(int, slot[1:].split("-"))
            return str(low + self._draw.below(high - low + 1))
        choices = slot.split("|")
        return choices[self._draw.below(len(choices))]


def written_documents(path: Path) -> Iterator[Document]:
    """The documents of one text file; its name begins with the language."""
    language = re.split(r"[_.]", path.name)[0]
    for block in re.split(r"^%%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, text = block.split("\n", 1)
        yield Document(language, title.strip() or None, text.strip("\n"))


def all_documents() -> list[Document]:
    """Every document, mixed in an order that depends on the texts only."""
    documents = list(EXACT)
    for path in sorted(HERE.glob("texts/*.txt")):
        documents.extend(written_documents(path))
    for path in sorted(HERE.glob("texts/pools/*.txt")):
        documents.extend(Pool(path).documents())
    return sorted(documents, key=lambda document: hashlib.sha256(document.text.encode()).digest())


def write_stories(documents: list[Document], path: Path) -> None:
    """Write the documents that have a title as Parquet."""
    stories = [document for document in documents if document.title is not None]
    table = pa.table(
        {
            "id": pa.array([f"story-{n:04d}" for n in range(1, len(stories) + 1)], pa.string()),
            "text": pa.array([story.text for story in stories], pa.string()),
            "language": pa.array([story.language for story in stories], pa.string()),
            "title": pa.array([story.title for story in stories], pa.string()),
        }
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demonstration collection and its tokenizer.")
    parser.add_argument("--directory", type=Path, default=HERE, help="where to write (default: next to this script)")
    directory: Path = parser.parse_args().directory
    documents = all_documents()
    write_stories(documents, directory / "stories.parquet")
    write_notes(documents, directory / "notes.jsonl")
    tokenizer = train_tokenizer(documents)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
