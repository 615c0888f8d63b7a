"""Write the demonstration collection: ``stories.parquet``, ``notes.jsonl`` and the ``tokenizer.json`` trained on both.

The texts come from three places. ``texts/<language>.txt`` holds documents that were written one by one: a line
``%%`` starts a note and a line ``%% Title`` a story. ``texts/pools/*.txt`` holds pools of sentences from which short
diary entries are put together (see ``Pool``). Documents in which every byte of white space matters are in ``EXACT``
below. The result depends on these texts and the versions of pyarrow and tokenizers only, never on chance or the clock.
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


EXACT = [
    Document(
        "en",
        None,
        "DELIVERY NOTE 20817\r\n\r\n"
        "To: Harrow Lane Primary School, kitchen entrance\r\n"
        "Driver: please ring twice, the first ring is always taken for the timer.\r\n\r\n"
        "  12 x flour, strong, 16 kg\r\n"
        "   4 x oats, rolled, 25 kg\r\n"
        "   1 x cinnamon (the large one, not the very large one)\r\n\r\n"
        "Received in good order, apart from one bag that had been leaning on the diesel.\r\n",
    ),
    Document(
        "de",
        None,
        "Protokoll der Wasserzähler\r\n"
        "Erdgeschoss: 01482,3\r\n"
        "1. Stock: 00977,0\r\n"
        "2. Stock: 02210,8 (Zähler läuft rückwärts, bitte prüfen)\r\n"
        "Abgelesen am 31.12. gegen Mittag, bei laufender Waschmaschine.\r\n",
    ),
    Document(
        "en",
        "Gauge readings, as they came off the logger",
        "station\ttaken_at\tdepth_cm\tremark\n"
        "Weir\t2023-02-11T06:00\t84.2\t\n"
        "Weir\t2023-02-11T12:00\t91.7\train\n"
        "Weir\t2023-02-11T18:00\t128.4\train, logs\n"
        "Mill\t2023-02-11T06:00\t61.0\t\n"
        "Mill\t2023-02-11T12:00\t-999\tduck on sensor\n"
        "Mill\t2023-02-11T18:00\t97.3\tduck gone\n\n"
        "A depth of -999 means that there was no reading. Leave it out before you take the mean: someone did not, and "
        "for a week the river was officially two metres above the road.\n",
    ),
    Document(
        "en",
        None,
        "The whole build of the newsletter is in this file; mind the tabs, make does.\n\n"
        "```make\n"
        "PAGES := $(wildcard pages/*.md)\n\n"
        "newsletter.pdf: $(PAGES) style.css\n"
        "\tpandoc --css style.css --output $@ $(PAGES)\n\n"
        ".PHONY: clean\n"
        "clean:\n"
        "\trm -f newsletter.pdf\n"
        "```\n\n"
        "If it says *missing separator*, an editor has turned a tab into spaces again.\n",
    ),
    Document(
        "en",
        "A retry that knows when to stop",
        "Our first version waited for one second and tried again, for ever. During the outage four hundred clients did "
        "that in step, like soldiers on a bridge. This is the second version:\n\n"
        "```go\n"
        "func Retry(ctx context.Context, attempts int, call func() error) error {\n"
        "\tvar err error\n"
        "\tfor n := 0; n < attempts; n++ {\n"
        "\t\tif err = call(); err == nil {\n"
        "\t\t\treturn nil\n"
        "\t\t}\n"
        "\t\tpause := time.Duration(rand.Int63n(int64(100*time.Millisecond) << n))\n"
        "\t\tselect {\n"
        "\t\tcase <-ctx.Done():\n"
        "\t\t\treturn ctx.Err()\n"
        "\t\tcase <-time.After(pause):\n"
        "\t\t}\n"
        "\t}\n"
        '\treturn fmt.Errorf("gave up after %d attempts: %w", attempts, err)\n'
        "}\n"
        "```\n\n"
        "The pause is random, its upper bound doubles with every attempt, and a caller who has lost interest can say "
        "so. We tested it by pulling out the plug, which is not in the repository.",
    ),
    Document(
        "en",
        None,
        "Group chat, Saturday 🎂\n"
        "Lena: who's bringing the cake 🍰🍰🍰\n"
        "Pau: me! but the oven is 🔥 (really. 🚒 came)\n"
        "Lena: 😱 are you all ok??\n"
        "Pau: 👍🏽 all fine. 👨‍👩‍👧‍👦 on the pavement, 🐈‍⬛ in a blanket, cake is… 🪨\n"
        "Siôn: I can make Welsh cakes 🏴󠁧󠁢󠁷󠁬󠁳󠁿 on the hob\n"
        "Lena: ❤️‍🔥 perfect. candles?\n"
        "Pau: not this year",
    ),
    Document(
        "en",
        None,
        "Two spellings that look the same: caf\u00e9 with one character for the last letter, and cafe\u0301 with an e "
        "followed by a combining accent. The search found the first and not the second, so half of the menus were "
        "missing. We now normalise what is searched for and what is searched through, and leave the menus as they are.",
    ),
    Document(
        "en",
        None,
        "Support case 982: a customer's page ended in the middle of a word. She had pasted an export in which records "
        f"were divided by the marker {END_OF_TEXT}, and one of our own tools took it for its own and stopped reading. "
        "Text is text, wherever it comes from; only the program that writes a file may put markers into it. The tool "
        f"now treats {END_OF_TEXT} in a customer's document as thirteen ordinary characters.",
    ),
    Document(
        "en",
        "Notes for the seminar on sums",
        "Claim. For every n ≥ 1, ∑ₖ₌₁ⁿ k³ = (∑ₖ₌₁ⁿ k)².\n\n"
        "Check it first: 1 = 1², 1 + 8 = 9 = 3², 1 + 8 + 27 = 36 = 6². Write Tₙ = n(n + 1)/2 for the sum of the first "
        "n numbers. Then Tₙ² − Tₙ₋₁² = (Tₙ − Tₙ₋₁)(Tₙ + Tₙ₋₁) = n · n² = n³, because Tₙ + Tₙ₋₁ = n². Add these up for "
        "k = 1, …, n; all but the last square cancel, and T₀ = 0.  ∎\n\n"
        "In the other notation: $\\sum_{k=1}^{n} k^3 = \\left(\\frac{n(n+1)}{2}\\right)^2$. Homework: ∀ε > 0 ∃δ > 0, "
        "and find out why everyone writes it with those two letters.",
    ),
    Document(
        "en",
        None,
        "    Menu for the long table\n\n\n"
        "  soup . . . . . . . . . . .  of the day before\n"
        "  fish . . . . . . . . . . .  if there was any wind\n"
        "  pie  . . . . . . . . . . .  yes   \n\n\n"
        "    (the baby eats free)\n",
    ),
    Document(
        "en",
        "A room with four languages",
        "Over the stove in the hostel hangs a board on which each guest has written the same request. In English: "
        "please wash the pan. In Hebrew: בבקשה לשטוף את המחבת. In Arabic: من فضلك اغسل المقلاة. In Japanese: "
        "フライパンを洗ってください。 Below, in a firm hand and in no language at all, somebody has drawn the pan. "
        "Since then it has been clean.",
    ),
    Document(
        "en",
        None,
        "Position after the 31st move, Black to play and, as it turned out, to go for a walk:\n\n"
        "  ┌─────────────────┐\n"
        "8 │ · · · · · ♜ ♚ · │\n"
        "7 │ · · · · · ♟ · ♟ │\n"
        "6 │ ♟ · · · · · ♟ · │\n"
        "5 │ · · · · ♟ · · · │\n"
        "4 │ · · · · ♙ · · · │\n"
        "3 │ · ♙ · · · ♕ · ♙ │\n"
        "2 │ · · · · · ♙ ♙ · │\n"
        "1 │ · · · ♖ · · ♔ · │\n"
        "  └─────────────────┘\n"
        "    a b c d e f g h",
    ),
    Document(
        "fr",
        None,
        "Étiquettes du marché : abricots, 3,20\u00a0€ le kilo\u202f; noix, 7\u00a0€\u202f; "
        "miel de châtaignier, 9,50\u00a0€ le pot. "
        "« Peut-on goûter\u202f? » Oui. « Encore\u202f? » Non.",
    ),
    Document(
        "es",
        None,
        "Marcador final:\n\n"
        "| Equipo            | 1.º | 2.º | 3.º | Total |\n"
        "|-------------------|----:|----:|----:|------:|\n"
        "| Los del puerto    |  12 |   9 |  15 |    36 |\n"
        "| Las de la huerta  |  10 |  14 |  13 |    37 |\n"
        "| Los forasteros    |   8 |  11 |   7 |    26 |\n\n"
        "El arbitraje corrió a cargo de la abuela de ambos equipos.",
    ),
]
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
