"""Decontamination.

Real text in many languages, in which questions of 30 words are planted: as they are, in capitals, without punctuation, with other
spaces, 13 words of one, and 12 words of one, which is not a match. Each program looks for 13 consecutive words, in one process:
the step `decontaminate`, and datatrove's `NGramsDecontFilter` with its words for English, which are spaCy's, and with words
between spaces, the fastest that it can be given. Reading Parquet and interpreter start count; nothing is tokenized or written.
Processor seconds, as other processes may run: medians. The other document that is found has 12 words of a question, which are 13
for spaCy: it takes `cannot` apart.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.bench import HERE, SHARED, Bench, Grid, python

PACKAGES = ("numpy", "pyarrow")
OTHERS = ("spacy==3.8.14", "xxhash==3.8.2")
QUESTIONS, WORDS, EVERY = 500, 30, 25
"""Questions, words of each, and one document in so many has some of one."""
STEP = """
import hashlib, json, sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from flat_tokens.steps.decontaminate import Decontaminate
from flat_tokens.steps.decontaminate import Questions
from flat_tokens.text.rows import text_buffers
directory, questions, output = sys.argv[1:]
texts = [json.loads(line)["text"] for line in Path(questions).read_text().splitlines()]
stored = Questions(*text_buffers(pa.array(texts, pa.large_string()))).stored()
digest = hashlib.sha256(stored).hexdigest()
Path(directory, digest).write_bytes(stored)
step, removed = Decontaminate(against=[{"name": "exam", "digest": digest}], sets_url=directory), []
for path in sorted(Path(directory).glob("*.parquet")):
    for batch in pq.ParquetFile(path).iter_batches(columns=["id", "text"]):
        documents = pa.record_batch({"text": batch.column("text").cast(pa.large_string())})
        keep = step(documents).keep
        if keep is not None:
            removed += batch.column("id").filter(pa.compute.invert(keep)).to_pylist()
Path(output).write_text(json.dumps(removed))
"""


def planted(files: list[Path], directory: Path) -> tuple[int, int, set[str]]:
    """Copies of Parquet files whose documents have questions here and there, which are in a file beside them. How many documents
    and bytes of text there are, and which documents have a match.
    """
    directory.mkdir(parents=True)
    dice = random.Random(0)
    tables = [pq.read_table(path, columns=["id", "text"]) for path in files]
    vocabulary = sorted(
        {word for word in " ".join(tables[0]["text"].to_pylist()[:2000]).split() if word.isalpha() and word.isascii()}
    )
    questions = [" ".join(dice.choices(vocabulary, k=WORDS)).capitalize() + "?" for _ in range(QUESTIONS)]
    (directory / "questions.jsonl").write_text("".join(f"{json.dumps({'text': one})}\n" for one in questions))
    number, found, text_bytes = 0, set[str](), 0
    for path, table in zip(files, tables, strict=True):
        texts = table["text"].to_pylist()
        for row, identity in enumerate(table["id"].to_pylist()):
            number += 1
            if number % EVERY == 0:
                words = dice.choice(questions).split()
                kind = number // EVERY % 6
                some = words if kind < 4 else words[5:18] if kind == 4 else words[5:17]
                between = (" ", " ", ", ", "\n  ", " ", " ")[kind]
                text = between.join(some)
                texts[row] += f" {text.upper() if kind == 1 else text} "
                if kind < 5:
                    found.add(identity)
        text_bytes += sum(len(text.encode()) for text in texts)
        pq.write_table(pa.table({"id": table["id"], "text": texts}), directory / path.name, compression="zstd")
    return number, text_bytes, found


def programs(bench: Bench, directory: Path, output: Path) -> Iterator[tuple[str, list[object]]]:
    """Each program by its name. A peer that cannot be installed is left out."""
    words = [directory, directory / "questions.jsonl", output]
    yield "`decontaminate`", [*python("-c", STEP), *words]
    try:
        interpreter = bench.peer("datatrove", *OTHERS)
    except RuntimeError:
        return
    program = HERE / "peer_programs" / "decontaminate_with_datatrove.py"
    for name, kind in (("datatrove, words between spaces", "spaces"), ("datatrove, spaCy's words", "spacy")):
        yield name, [interpreter, program, *words, kind]


def measure(bench: Bench) -> list[Grid]:
    files = sorted((SHARED / "corpus").glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{SHARED / 'corpus'}: there are no Parquet files")
    directory, rows, first = bench.fresh("decontamination"), list[list[object]](), 0.0
    documents, text_bytes, matches = planted(files[:1], directory)
    output = directory / "removed.json"
    for name, command in programs(bench, directory, output):
        cpu = bench.runs(command).median("cpu")
        removed = set(json.loads(output.read_text()))
        first = first or cpu
        found = f"{len(removed & matches):,} of {len(matches):,}"
        others = len(removed - matches)
        rows.append([name, f"{cpu:.1f}", f"{text_bytes / 1e6 / cpu:.1f}", f"{cpu / first:.0f} times", found, others])
    header = ["", "processor, s", "MB/s of text a core", "this / step", "planted documents found", "others found"]
    about = f"{text_bytes / 1e6:,.0f} MB of text in {documents:,} documents, {QUESTIONS:,} questions."
    return [Grid(header, rows, about)]
