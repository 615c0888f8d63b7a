"""Reading.

200 million tokens in documents of lognormal length, ids by Zipf's law; each figure the best of seven passes with the sides in
turn. `np.memmap` reads the same tokens from a raw file, zarr is zarr-python on the same dataset, `reference` is
the reference writer's zarr v2 layout (4 Mi chunks, Blosc lz4 with bitshuffle). A torch DataLoader is there where torch is
installed: `make peers`.
"""

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr

import flat_tokens
from flat_tokens import TokenBatch, write_dataset
from flat_tokens.arrays.layouts import LAYOUTS
from tests.benchmarks.bench import Bench, Grid, best, python, run_whole

PACKAGES = ("zarr", "numpy", "numcodecs", "torch")
TOKENS = 200_000_000
LENGTH = 2048
BATCH = 512
PASSES = 7


def documents(token_count: int, highest_id: int = 100_000) -> Iterator[TokenBatch]:
    """Documents of 1 to some 5,000 tokens whose ids follow Zipf's law and repeat as phrases do, 4 Mi tokens at a time."""
    rng = np.random.default_rng(0)
    phrases = np.minimum(rng.zipf(1.2, (1 << 16, 8)), highest_id).astype(np.uint32)
    for start in range(0, token_count, 1 << 22):
        count = min(1 << 22, token_count - start)
        tokens = phrases[np.minimum(rng.zipf(1.1, -(-count // 8)), len(phrases)) - 1].reshape(-1)[:count].copy()
        lengths = rng.lognormal(6, 1.2, count // 100).astype(np.uint64) + np.uint64(1)
        ends = np.cumsum(lengths)
        ends = ends[ends < count]
        yield TokenBatch.from_flat(tokens, np.concatenate([[0], ends, [count]]).astype(np.uint64))


def make(scratch: Path, token_count: int) -> None:
    """The same tokens in each layout, as the reference writer has them, and as a raw file."""
    for layout in LAYOUTS:
        write_dataset(scratch / layout, documents(token_count), layout=layout)
    dataset = flat_tokens.open(scratch / "mmap")
    blosc = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE)
    group = zarr.open_group(scratch / "reference", mode="w-", zarr_format=2)
    for name, source in dataset.splits.items():
        split = group.create_group(name, attributes={"max_token_id": source.max_token_id})
        tokens, starts = source.slice(0, source.token_count), source.seq_starts.read(0, source.seq_starts.length)
        split.create_array("encoded_tokens", data=tokens, chunks=(1 << 22,), compressors=blosc)
        split.create_array("seq_starts", data=starts, chunks=(1 << 20,), compressors=blosc, filters=[numcodecs.Delta("i8")])
    with (scratch / "tokens.bin").open("wb") as file:
        file.write(dataset.train.slice(0, dataset.train.token_count).data)


def packed_by_zarr(array: Any, i: int) -> Any:
    """Packed sequence *i* of an array that zarr has opened."""
    return array[i * LENGTH : (i + 1) * LENGTH]


def each(read: Callable[[Any], object], items: Sequence[Any]) -> tuple[Callable[[], object], int]:
    def run() -> None:
        for i in items:
            read(i)

    return run, len(items)


def compared(above: str, sides: dict[str, tuple[Callable[[], object], int]], passes: int) -> Grid:
    """The best of the passes of each side as microseconds, and beside the first side's."""
    times = best(sides, passes)
    first = next(iter(times.values()))
    return Grid(["", "µs", "times the first"], [[name, f"{s * 1e6:.2f}", f"{s / first:.2f}"] for name, s in times.items()], above)


def warm(scratch: Path, passes: int) -> list[Grid]:
    raw = np.memmap(scratch / "tokens.bin", "<u4", "r")
    raw[::1024].sum()  # into the page cache
    layouts = {layout: flat_tokens.open(scratch / layout).train for layout in (*LAYOUTS, "reference")}
    layouts["mmap"].slice(0, layouts["mmap"].token_count)
    packed = {name: train.packed(LENGTH) for name, train in layouts.items()}
    arrays = {name: zarr.open_array(scratch / name / "train/encoded_tokens", mode="r") for name in layouts}
    order = np.random.default_rng(1).integers(0, len(packed["mmap"]), 16 * BATCH)
    rows = order.tolist()
    few, some = rows[:200], rows[:2000]
    sides = {"np.memmap, slice and copy": each(lambda i: raw[i * LENGTH : (i + 1) * LENGTH].copy(), rows)}
    sides["`mmap`: `slice`"] = each(lambda i: layouts["mmap"].slice(i * LENGTH, (i + 1) * LENGTH), rows)
    sides["`mmap`: `packed[i]`"] = each(packed["mmap"].__getitem__, rows)
    sides["`mmap`: zarr"] = each(partial(packed_by_zarr, arrays["mmap"]), few)
    for name in ("compact", "zarr2", "reference"):
        sides[f"`{name}`: `packed[i]`"] = each(packed[name].__getitem__, some if name == "compact" else few)
        sides[f"`{name}`: zarr"] = each(partial(packed_by_zarr, arrays[name]), few[:50])
    one = compared(f"One random packed sequence of {LENGTH:,} tokens, warm page cache:", sides, passes)

    batches = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
    lists, out = [batch.tolist() for batch in batches], np.empty((BATCH, LENGTH), np.uint32)

    def fill(batch: list[int]) -> None:
        for k, i in enumerate(batch):
            out[k] = raw[i * LENGTH : (i + 1) * LENGTH]

    sides = {"np.memmap, np.stack": each(lambda batch: np.stack([raw[i * LENGTH : (i + 1) * LENGTH] for i in batch]), lists)}
    sides["np.memmap, into one array for all batches"] = each(fill, lists)
    sides["`batch`"] = each(packed["mmap"].batch, batches)
    sides["`__getitems__` (512 items, as torch's loader asks)"] = each(packed["mmap"].__getitems__, lists)
    return [one, compared(f"A batch of {BATCH} such sequences, warm page cache:", sides, passes)]


LOADER = """
import sys, time, numpy as np, flat_tokens
from flat_tokens import ShuffledLoader
packed = flat_tokens.open(sys.argv[1]).train.packed(2048)
loader = ShuffledLoader(packed, 512, seed=0, epochs=None)
steps = int(sys.argv[3])
for pass_ in range(3):
    begin, busy = time.perf_counter(), time.process_time()
    for batch in loader.steps(0, steps, prefetch=2):
        batch.encoded if sys.argv[2] == "encoded" else (batch.inputs, batch.targets)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
print(seconds / steps, busy / steps)
"""
NANOGPT = """
import sys, time, numpy as np, torch
class Tokens(torch.utils.data.Dataset):
    def __init__(self, path): self.path = path; self.count = np.memmap(path, np.uint32, "r").size // 2048 - 1
    def __len__(self): return self.count
    def __getitem__(self, i):
        if not hasattr(self, "data"): self.data = np.memmap(self.path, np.uint32, "r")
        part = self.data[i * 2048 : (i + 1) * 2048 + 1].astype(np.int64)
        return torch.from_numpy(part[:-1]), torch.from_numpy(part[1:])
if __name__ == "__main__":
    steps = int(sys.argv[3])
    loader = torch.utils.data.DataLoader(Tokens(sys.argv[1]), 512, shuffle=True, num_workers=int(sys.argv[2]))
    it = iter(loader)
    next(it)
    begin = time.perf_counter()
    for _ in range(steps): next(it)
    print((time.perf_counter() - begin) / steps)
"""


def told(*words: object) -> list[float]:
    """The numbers that a program prints."""
    return [*map(float, run_whole(python(*words)).out.split())]


RATES = ["", "ms a batch", "ms of a processor", "GB/s of 4-byte tokens"]


def rates(name: str, seconds: float, busy: float | None = None, share: float = 1) -> list[str]:
    """Cells of a batch. A peer's workers are processes of their own: nobody knows how *busy* they were."""
    processor = "–" if busy is None else f"{busy * 1e3:.2f}"
    return [name, f"{seconds * 1e3:.2f}", processor, f"{BATCH * LENGTH * share * 4 / seconds / 1e9:.2f}"]


def loader(bench: Bench, scratch: Path) -> Grid:
    """Batches to a consumer, a process a side."""
    program = scratch / "nanogpt_loader.py"
    program.write_text(NANOGPT)  # its workers are processes that import it
    share = bench.size(1, 10)
    commands: dict[str, list[object]] = {
        "`ShuffledLoader`, prefetch 2, `mmap`, as stored": ["-c", LOADER, scratch / "mmap", "encoded", 150 // share],
        "the same, `inputs` and `targets` derived by the consumer": ["-c", LOADER, scratch / "mmap", "fields", 100 // share],
        "`ShuffledLoader`, `compact`": ["-c", LOADER, scratch / "compact", "encoded", 100 // share],
        "`ShuffledLoader`, `zarr2`": ["-c", LOADER, scratch / "zarr2", "encoded", 30 // share],
    }
    if importlib.util.find_spec("torch"):
        for workers, name in ((0, "no workers"), (2, "2 workers"))[bench.size(0, 1) :]:
            peer = f"torch DataLoader over np.memmap, int64 inputs and targets, {name}"
            commands[peer] = [program, scratch / "tokens.bin", workers, bench.size(30, 1)]
    rows = [rates(name, *told(*command)) for name, command in commands.items()]
    return Grid(RATES, rows, f"Batches of {BATCH} x {LENGTH:,} tokens to a consumer:")


PACKS = """
import sys, time, numpy as np, flat_tokens
from flat_tokens import FillInMiddle, ShuffledLoader
class Taken:
    "The tokens of a view's rows, by np.take from a raw file."
    def __init__(self, view, path): self.view, self.raw = view, np.memmap(path, np.uint32, "r")
    def __len__(self): return len(self.view)
    def batch(self, rows):
        starts, counts = self.view.token_ranges(rows)
        before = np.cumsum(counts) - counts
        return {"tokens": np.take(self.raw, np.repeat(starts - before, counts) + np.arange(counts.sum()))}
train = flat_tokens.open(sys.argv[1]).train
rows, options = {
    "packed": (train.packed, {}),
    "greedy": (train.packed_documents, {"too_long": "cut"}),
    "best": (train.packed_documents, {"fit": "best", "too_long": "cut"}),
    "crop": (train.packed_documents, {"fit": "crop"}),
    "keep": (train.packed_documents, {"fit": "crop", "on_crop": "keep"}),
}[sys.argv[2]]
fim = FillInMiddle(0.5, 0.5, 1, 2, 3) if sys.argv[3] == "fim" else None
view = rows(2048, **options, fim=fim)
share = view.fill.share
view = Taken(view, sys.argv[5]) if sys.argv[3] == "take" else view
loader = ShuffledLoader(view, 512, seed=0, epochs=None)
steps, seconds, busy = int(sys.argv[4]), [], []
for pass_ in range(4):
    begin, used = time.perf_counter(), time.process_time()
    for batch in loader.steps(0, steps, prefetch=4, threads=2):
        pass
    seconds.append(time.perf_counter() - begin)
    busy.append(time.process_time() - used)
print(min(seconds[1:]) / steps, min(busy[1:]) / steps, share)
"""


def packs(bench: Bench, scratch: Path) -> Grid:
    """Packs and fill in the middle, by two threads. A pack has 24 bytes a place: tokens, labels, positions, documents. The figure
    counts four of them, those of `tokens`, and no padding.
    """
    views = {
        "`packed`": ("packed", ""),
        "`packed`, half of the documents filled in the middle": ("packed", "fim"),
        "`packed_documents`": ("greedy", ""),
        '`packed_documents(fit="best")`': ("best", ""),
        '`packed_documents(fit="crop")`': ("crop", ""),
        'the same, `on_crop="keep"`': ("keep", ""),
        "the same, half of the documents filled in the middle": ("keep", "fim"),
        "the tokens of `crop` alone, by `np.take` of a raw file": ("crop", "take"),
    }
    more = bench.size(60, 3), scratch / "tokens.bin"
    rows = [rates(name, *told("-c", PACKS, scratch / "mmap", *words, *more)) for name, words in views.items()]
    above = f"Batches of {BATCH} x {LENGTH:,} places to a consumer, by two threads, `mmap`:"
    return Grid([*RATES[:-1], "GB/s of 4-byte tokens, without padding"], rows, above)


def small_batches(scratch: Path, passes: int) -> Grid:
    """Rows that were not read before, and packs."""
    splits = {layout: flat_tokens.open(scratch / layout).train for layout in ("mmap", "compact")}
    views: dict[str, Any] = {f"`{layout}`: `packed`": split.packed(LENGTH) for layout, split in splits.items()}
    for fit in ("greedy", "best", "crop"):
        views[f"`mmap`: `{fit}`"] = splits["mmap"].packed_documents(LENGTH, fit=fit, too_long="error" if fit == "crop" else "cut")
    rng = np.random.default_rng
    sides = {name: each(view.batch, [*rng(2).integers(0, len(view), (200, 8))]) for name, view in views.items()}
    return compared(f"Batches of 8 x {LENGTH:,} tokens:", sides, passes)


MIXTURE = """
import sys, time, flat_tokens
begin = time.perf_counter()
views = [flat_tokens.open(path).train.packed(2048) for path in sys.argv[1:]]
mixture = flat_tokens.Mixture([(view, 1 + k % 7) for k, view in enumerate(views)], 512, seed=1)
mixture[0]
first, best = time.perf_counter() - begin, float("inf")
for _ in range(5):
    used = time.process_time()
    for step in range(20):
        mixture[step]
    best = min(best, (time.process_time() - used) / 20)
print(first, best)
"""


def mixtures(bench: Bench, scratch: Path) -> Grid:
    """Mixtures of copies of a small dataset, and the batches of one that has the rows of many."""
    tokens, copies = bench.size(1 << 20, 1 << 17), [scratch / "many" / str(k) for k in range(bench.size(1000, 10))]
    few = len(copies) // 10
    write_dataset(scratch / "small", documents(tokens))
    write_dataset(scratch / "one", documents(few * tokens))
    for path in copies:
        shutil.copytree(scratch / "small", path)
    rows = []
    for paths in ([scratch / "one"], copies[:few], copies):
        first, busy = told("-c", MIXTURE, *paths)
        rows.append([str(len(paths)), f"{first:.2f}", f"{busy * 1e3:.2f}"])
    above = f"A mixture of several datasets of {tokens:,} tokens, batches of {BATCH} x {LENGTH:,}. The one has those of {few}:"
    return Grid(["datasets", "opened and first batch, s", "ms of a processor a batch"], rows, above)


def measure(bench: Bench) -> list[Grid]:
    scratch, passes = bench.fresh("reading"), bench.size(PASSES, 1)
    make(scratch, bench.size(TOKENS, 2_000_000))
    return [*warm(scratch, passes), loader(bench, scratch), packs(bench, scratch)]
