"""Other ways to the same tokens.

The same files and the same tokenizer, gpt2 from the same `tokenizer.json`, for datatrove, `datasets.map`, Megatron's preprocess
and its fast one, each in a virtual environment with the versions of `tests/benchmarks/peer_programs/*.txt`, with a process or a
thread a core, compared with a build. The fast one has the build's engine. It reads JSON lines and writes `.idx` and `.bin`, as
its users run it; it holds all tokens in memory, checks and resumes nothing, and has no split. The text is one file of 125 MB, a
single slice, whose batches all threads of the build tokenize. Megatron reads JSON lines; writing these is not counted. Whole
processes, in turn, warm page cache; medians (least to greatest). `same documents`: how many of the documents have exactly the
build's tokens, end-of-text tokens left out. Text such as `<|endoftext|>` is one special token for the peers, and ordinary text
for the build.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import flat_tokens
from tests.benchmarks.bench import HERE, Bench, Grid, flows, warm
from tests.benchmarks.corpus import as_json_lines

PACKAGES = ("gigatoken", "tokenizers", "pyarrow")
SHARE = 0.1
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}

Document = npt.NDArray[np.unsignedinteger]


def of_datatrove(output: Path) -> Iterator[Document]:
    """A file of uint16 tokens for each task, and beside it the ends of its documents as uint64; the last token ends the text."""
    for path in sorted((output / "tokens").glob("*.ds")):
        tokens, ends = np.fromfile(path, "<u2"), np.fromfile(f"{path}.index", "<u8").astype(np.int64)
        yield from (part[:-1] for part in np.split(tokens, ends)[: len(ends)])


def of_datasets(output: Path) -> Iterator[Document]:
    """Streams of Arrow batches, one from each process."""
    for path in sorted(output.glob("tokens*.arrow")):
        with pa.memory_map(str(path)) as file:
            for batch in pa.ipc.open_stream(file):
                ids = batch.column("input_ids")
                tokens, ends = ids.flatten().to_numpy(), ids.offsets.to_numpy()
                yield from np.split(tokens, ends[1:] - ends[0])[: len(ids)]


def of_megatron(output: Path) -> Iterator[Document]:
    """uint16 tokens, and an index: 34 bytes of header, then the sequences' lengths as int32; the last token ends the text."""
    index = (output / "tokens.idx").read_bytes()
    lengths = np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34)
    yield from (part[:-1] for part in np.split(np.fromfile(output / "tokens.bin", "<u2"), np.cumsum(lengths))[: len(lengths)])


class Peer(NamedTuple):
    """A peer: its name, whether it reads JSON lines, the name of its pins, and what is installed in addition, and how its output
    is read.
    """

    name: str
    json_lines: bool
    packages: Sequence[str]
    documents: Callable[[Path], Iterator[Document]]


PEERS = {
    "datatrove": Peer("datatrove, `DocumentTokenizer`", False, ("datatrove",), of_datatrove),
    "datasets": Peer("`datasets.map`, transformers' fast tokenizer", False, ("datasets",), of_datasets),
    "megatron": Peer("Megatron's preprocess", True, ("megatron", "torch==2.13.0"), of_megatron),
    "megatron_fast": Peer("Megatron's fast preprocess", True, ("megatron", "torch==2.13.0"), of_megatron),
}


def equal(ours: Iterable[Document], theirs: Iterable[Document]) -> tuple[int, int]:
    """How many documents have the same tokens, and how many there are on the longer side."""
    pairs = [(a is not None and b is not None and np.array_equal(a, b)) for a, b in itertools.zip_longest(ours, theirs)]
    return sum(pairs), len(pairs)


def built(output: Path) -> Iterator[Document]:
    """The documents of a build without a validation split."""
    train = flat_tokens.open(output).train
    return (train[i] for i in range(train.seq_count))


def measure(bench: Bench) -> list[Grid]:
    text = bench.share(SHARE)
    tokenizer = bench.vocabulary / "tokenizer.json"
    if not tokenizer.exists():
        raise FileNotFoundError(f"{tokenizer}: there is no such file. Name a directory with gpt2's own by --vocabulary.")
    lines = as_json_lines(text, bench.scratch / "peers.jsonl")
    ours, theirs = bench.fresh("build-of-peers"), bench.fresh("peers-output")
    config = bench.config(ours, text, tokenizer=str(tokenizer), validation_fraction=0)
    commands: dict[str, tuple[Sequence[object], Path]] = {"": (flows("build", config), ours)}
    absent = []
    for name, peer in PEERS.items():
        try:
            interpreter = bench.peer(*peer.packages)
        except RuntimeError as error:
            absent.append([peer.name, str(error), *["–"] * 5])
            continue
        source = lines if peer.json_lines else text.directory
        program = HERE / "peer_programs" / f"with_{name}.py"
        commands[name] = [interpreter, program, source, bench.vocabulary, theirs, os.cpu_count()], theirs
    same = {"": "–"}

    def compare(name: str, _: object) -> None:
        if name:
            right, count = equal(built(ours), PEERS[name].documents(theirs))
            same[name] = f"{right:,} of {count:,}"

    warm([*text.paths, lines])
    with mock.patch.dict(os.environ, OFFLINE):
        runs = bench.in_turn(commands, compare)
    lines.unlink()
    rows = [
        [
            PEERS[name].name if name else "build",
            found.spread,
            f"{text.text_bytes / 1e6 / found.median():.1f}",
            f"{found.median() / runs[''].median():.1f} times",
            f"{found.median('cpu'):.0f}",
            found.megabytes,
            same[name],
        ]
        for name, found in runs.items()
    ]
    rows += absent
    header = ["", "s", "MB/s of text", "build / this", "processor, s", "peak memory, MB", "same documents"]
    return [Grid(header, rows, f"{text.text_bytes / 1e6:,.0f} MB of text in {text.documents:,} documents.")]
