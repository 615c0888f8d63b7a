"""Random reads, batches, opening and packing, side by side with np.memmap and zarr-python, in one run.

    python tests/benchmarks/reading.py --scratch $BENCH [--tokens 200_000_000] [--only warm cold loader open remote]

Prints a Markdown table a section. Every figure is the best of several passes, peers and this library in turn.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numcodecs
import numpy as np
import zarr

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import flat_tokens  # noqa: E402
from flat_tokens import TokenBatch, write_dataset  # noqa: E402

LENGTH = 2048
BATCH = 512
PASSES = 7
SECTIONS = ("warm", "cold", "loader", "open", "remote")


def documents(token_count: int) -> Iterator[TokenBatch]:
    """Documents of 1 to some 5,000 tokens whose ids follow Zipf's law and repeat as phrases do, 4 Mi tokens at a time."""
    rng = np.random.default_rng(0)
    phrases = np.minimum(rng.zipf(1.2, (1 << 16, 8)), 100_000).astype(np.uint32)
    for start in range(0, token_count, 1 << 22):
        count = min(1 << 22, token_count - start)
        tokens = phrases[np.minimum(rng.zipf(1.1, -(-count // 8)), len(phrases)) - 1].reshape(-1)[:count].copy()
        lengths = rng.lognormal(6, 1.2, count // 100).astype(np.uint64) + np.uint64(1)
        ends = np.cumsum(lengths)
        ends = ends[ends < count]
        yield TokenBatch.from_flat(tokens, np.concatenate([[0], ends, [count]]).astype(np.uint64))


def make(scratch: Path, token_count: int) -> None:
    if (scratch / "done").exists():
        return
    shutil.rmtree(scratch, ignore_errors=True)
    for layout in ("mmap", "compact"):
        write_dataset(scratch / layout, documents(token_count), layout=layout)
    train = flat_tokens.open(scratch / "mmap").train
    blosc = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE)
    group = zarr.open_group(scratch / "reference", mode="w-", zarr_format=2)
    for name in ("train", "validation"):
        split, source = group.create_group(name), train if name == "train" else flat_tokens.open(scratch / "mmap").validation
        split.attrs["max_token_id"] = source.max_token_id
        tokens = split.create_array(
            "encoded_tokens", shape=(source.token_count,), chunks=(1 << 22,), dtype="<u4", compressors=blosc
        )
        starts = split.create_array(
            "seq_starts",
            shape=(source.seq_count + 1,),
            chunks=(1 << 20,),
            dtype="<u8",
            compressors=blosc,
            filters=[numcodecs.Delta("i8")],
        )
        for start in range(0, source.token_count, 1 << 22):
            stop = min(start + (1 << 22), source.token_count)
            tokens[start:stop] = source.slice(start, stop)
        starts[:] = source.seq_starts.read(0, source.seq_starts.length)
    with (scratch / "tokens.bin").open("wb") as file:
        for start in range(0, train.token_count, 1 << 22):
            file.write(train.slice(start, min(start + (1 << 22), train.token_count)).data)
    (scratch / "done").touch()


def best(sides: dict[str, tuple[Callable[[], object], int]], passes: int = PASSES) -> dict[str, float]:
    """Seconds a call of each side, the sides in turn: {name: (pass over all calls, number of calls)}."""
    times = dict.fromkeys(sides, float("inf"))
    for _ in range(passes):
        for name, (run, calls) in sides.items():
            begin = time.perf_counter()
            run()
            times[name] = min(times[name], (time.perf_counter() - begin) / calls)
    return times


def each(read: Callable[[int], object], items: list[int]) -> tuple[Callable[[], object], int]:
    def run() -> None:
        for i in items:
            read(i)

    return run, len(items)


def table(title: str, times: dict[str, float], unit: float = 1e-6, name: str = "µs", against: str | None = None) -> None:
    against = against or next(iter(times))
    print(f"\n{title}\n\n| | {name} | times {against} |\n|---|---|---|")
    for side, seconds in times.items():
        print(f"| {side} | {seconds / unit:.2f} | {seconds / times[against]:.2f} |")


def warm(scratch: Path) -> None:
    raw = np.memmap(scratch / "tokens.bin", "<u4", "r")
    raw[::1024].sum()  # into the page cache
    layouts = {layout: flat_tokens.open(scratch / layout).train for layout in ("mmap", "compact", "reference")}
    layouts["mmap"].slice(0, layouts["mmap"].token_count)
    packed = {name: train.packed(LENGTH) for name, train in layouts.items()}
    arrays = {name: zarr.open_array(scratch / name / "train/encoded_tokens", mode="r") for name in layouts}
    order = np.random.default_rng(1).integers(0, len(packed["mmap"]), 16 * BATCH)
    rows = order.tolist()
    few, some = rows[:200], rows[:2000]
    sides = {"np.memmap, slice and copy": each(lambda i: raw[i * LENGTH : (i + 1) * LENGTH].copy(), rows)}
    sides["mmap: slice"] = each(lambda i: layouts["mmap"].slice(i * LENGTH, (i + 1) * LENGTH), rows)
    sides["mmap: packed[i]"] = each(packed["mmap"].__getitem__, rows)
    sides["mmap: zarr"] = each(lambda i: arrays["mmap"][i * LENGTH : (i + 1) * LENGTH], few)
    for name in ("compact", "reference"):
        sides[f"{name}: packed[i]"] = each(packed[name].__getitem__, some if name == "compact" else few)
        sides[f"{name}: zarr"] = each(lambda i, name=name: arrays[name][i * LENGTH : (i + 1) * LENGTH], few[:50])
    table(f"One random packed sequence of {LENGTH} tokens, warm", best(sides))

    batches = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
    lists = [batch.tolist() for batch in batches]

    def memmap_stack() -> None:
        for batch in lists:
            np.stack([raw[i * LENGTH : (i + 1) * LENGTH] for i in batch])

    def memmap_into() -> None:
        out = np.empty((BATCH, LENGTH), np.uint32)
        for batch in lists:
            for k, i in enumerate(batch):
                out[k] = raw[i * LENGTH : (i + 1) * LENGTH]

    def ours() -> None:
        for batch in batches:
            packed["mmap"].batch(batch)

    def items() -> None:
        for batch in lists:
            packed["mmap"].__getitems__(batch)

    runs = {"np.memmap, np.stack": memmap_stack, "np.memmap, one array for all": memmap_into, "mmap: batch": ours}
    runs["mmap: __getitems__"] = items
    table(f"A batch of {BATCH} such sequences, warm", best({name: (run, len(batches)) for name, run in runs.items()}))


def forget(scratch: Path) -> None:
    """Drop the files from the page cache."""
    for path in scratch.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cold(scratch: Path) -> None:
    import mmap

    rng = np.random.default_rng(2)
    times = {name: float("inf") for name in ("np.memmap with MADV_RANDOM", "np.memmap", "mmap: packed[i]", "mmap: batch of 64")}
    for _ in range(5):
        for name in times:
            forget(scratch)
            train = flat_tokens.open(scratch / "mmap").train
            packed = train.packed(LENGTH)
            rows = rng.permutation(len(packed))[:320]
            packed[0]
            raw = np.memmap(scratch / "tokens.bin", "<u4", "r")
            if "MADV_RANDOM" in name:
                raw._mmap.madvise(mmap.MADV_RANDOM)
            begin = time.perf_counter()
            if "batch" in name:
                for k in range(0, len(rows), 64):
                    packed.batch(rows[k : k + 64])
            elif "packed" in name:
                for i in rows.tolist():
                    packed[i]
            else:
                for i in rows.tolist():
                    raw[i * LENGTH : (i + 1) * LENGTH].copy()
            times[name] = min(times[name], (time.perf_counter() - begin) / len(rows))
            del raw, train, packed
    table(f"One random packed sequence of {LENGTH} tokens, page cache dropped", times)


LOADER = """
import sys, time, numpy as np, flat_tokens
from flat_tokens import ShuffledLoader
packed = flat_tokens.open(sys.argv[1]).train.packed(2048)
loader = ShuffledLoader(packed, 512, seed=0, epochs=None)
steps = int(sys.argv[3])
for pass_ in range(3):
    begin = time.perf_counter()
    for batch in loader.steps(0, steps, prefetch=2):
        batch.encoded if sys.argv[2] == "encoded" else (batch.inputs, batch.targets)
    seconds = time.perf_counter() - begin
print(seconds / steps)
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


def loader(scratch: Path) -> None:
    def run(program: str, *args: object) -> float:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", program, *map(str, args)], env=env, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
            return float("nan")
        return float(done.stdout)

    program = scratch / "nanogpt_loader.py"
    program.write_text(NANOGPT)
    times = {"mmap, shuffled, encoded tokens": run(LOADER, scratch / "mmap", "encoded", 150)}
    times["mmap, shuffled, inputs and targets"] = run(LOADER, scratch / "mmap", "fields", 100)
    times["compact, shuffled, encoded tokens"] = run(LOADER, scratch / "compact", "encoded", 30)
    for workers in (0, 2):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, program, scratch / "tokens.bin", workers, 30]
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        if done.returncode == 0:
            times[f"torch DataLoader over np.memmap, {workers} workers"] = float(done.stdout)
    print(f"\nBatches of {BATCH} x {LENGTH} tokens to a consumer\n\n| | ms a batch | GB/s of 4-byte tokens |\n|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds * 1e3:.2f} | {BATCH * LENGTH * 4 / seconds / 1e9:.2f} |")


OPEN = """
import re, sys, time
import flat_tokens
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
begin = time.perf_counter()
dataset = flat_tokens.open(sys.argv[1])
seconds = time.perf_counter() - begin
print(seconds, (peak() - before) / 1e3)
begin = time.perf_counter()
packs = dataset.train.packed_documents(2048, too_long="cut") if sys.argv[2] == "pack" else ()
print(time.perf_counter() - begin, len(packs), (peak() - before) / 1e3)
"""


def opening(scratch: Path) -> None:
    path = scratch / "many"
    if not path.exists():
        rng = np.random.default_rng(3)

        def short() -> Iterator[TokenBatch]:
            for _ in range(100):
                lengths = rng.integers(1, 60, 100_000)
                starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
                yield TokenBatch.from_flat(np.ones(int(starts[-1]), np.uint32), starts)

        write_dataset(path, short())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(path), "pack"], env=env, capture_output=True, text=True, check=True
        )
        runs.append([float(figure) for figure in done.stdout.split()])
    seconds, memory, packing, packs, peak = (min(column) for column in zip(*runs, strict=True))
    print(f"\n10,000,000 sequences: open() {seconds * 1e3:.1f} ms, {memory:.1f} MB; greedy packing index at 2,048 tokens")
    print(f"{packing:.2f} s, {packs:.0f} packs, memory up by {peak:.0f} MB in all")


def remote(scratch: Path) -> None:
    """Through a proxy that holds every answer for 30 ms."""
    import asyncio
    import threading

    from aiohttp import web

    from tests.proxy import proxy

    def serve(ready: list[int], event: threading.Event) -> None:
        async def forever() -> None:
            app = web.Application()
            app.router.add_static("/", scratch)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ready.append(runner.addresses[0][1])
            event.set()
            await asyncio.sleep(1e9)

        asyncio.run(forever())

    ready: list[int] = []
    event = threading.Event()
    threading.Thread(target=serve, args=(ready, event), daemon=True).start()
    event.wait()
    rng = np.random.default_rng(4)
    print("\nOver HTTP with 30 ms a request\n\n| | ms | requests |\n|---|---|---|")
    with proxy(f"http://127.0.0.1:{ready[0]}", delay=0.03) as slow:
        for layout in ("mmap", "compact"):
            begin = time.perf_counter()
            packed = flat_tokens.open(f"{slow.url}/{layout}").train.packed(LENGTH)
            print(f"| {layout}: open | {(time.perf_counter() - begin) * 1e3:.0f} | {len(slow.requests)} |")
            packed.batch(np.arange(0, len(packed), 16))  # indexes of shards
            for name, count in (("one sequence", 1), ("64 sequences", 64)):
                lines = []
                for _ in range(PASSES):
                    rows = rng.integers(0, len(packed), count)
                    slow.requests.clear()
                    begin = time.perf_counter()
                    packed.batch(rows)
                    lines.append((time.perf_counter() - begin, len(slow.requests)))
                print(f"| {layout}: {name} | {min(lines)[0] * 1e3:.0f} | {min(lines)[1]} |")
            slow.requests.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS)
    args = parser.parse_args()
    make(args.scratch, args.tokens)
    sections = {"warm": warm, "cold": cold, "loader": loader, "open": opening, "remote": remote}
    for name in args.only:
        sections[name](args.scratch)


if __name__ == "__main__":
    main()
