"""Engines: Arrow texts in, flat token ids out, a fast one like the reference; and a slice to token batches."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import sys
import threading
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s, UInt8s, UInt32s, UInt64s
from flat_tokens.batch import TokenBatch
from flat_tokens.columns import texts_as_arrow
from flat_tokens.manifest import TokenBytes
from flat_tokens.rows.views import running_sums
from flat_tokens.text.rows import text_buffers
from flat_tokens.tools.terminal import duration, size
from tasks.config import DocumentPolicy, Source, TokenizerConfig, available_memory
from tasks.models import Slice
from tasks.rows import ROW, fact
from tasks.text.documents import Tally, TextBatch, bad_document, by_reason, row_name
from tasks.tokenize.probes import awkward_texts

logger = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """Token ids of many texts: uint32[n], writable; text i is ``ids[offsets[i]:offsets[i + 1]]``, int64[m + 1]. ``mask``: 1 where
    a token counts for the loss, else 0, uint8[n]; None: all tokens count.
    """

    ids: UInt32s
    offsets: Int64s
    mask: UInt8s | None = None


class Encoder(Protocol):
    """Texts to tokens. A text that cannot be encoded does not affect the others."""

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        """Tokens of all texts together. UnencodableError if one of them cannot be encoded."""
        ...

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        """Tokens of each text alone, or why there are none."""
        ...


Encode = Callable[[pa.LargeStringArray], Tokens]


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. ``digest`` covers every byte that decides its tokens; ``make_fast`` makes one engine a thread."""

    name: str
    digest: str
    highest_id: int
    reference: Encode
    make_fast: Callable[[], Encode] | None
    decode: Callable[[list[int]], str]
    revision: str | None = None
    limits: tuple[bool, int] | None = None
    why_slow: str | None = None
    """Why it has no fast engine, where the reference is slow."""
    probes: Callable[[], Iterable[str]] = tuple
    """Texts that its definition calls for, on which engines are compared."""
    token_bytes: Callable[[], TokenBytes] | None = None
    """The bytes of each of its ids."""


def large_string_array(*texts: str) -> pa.LargeStringArray:
    """Texts as an array."""
    return texts_as_arrow(texts)


def concatenate(arrays: Iterable[UInt32s]) -> Tokens:
    """Flat ids and offsets of one array a text."""
    parts = list(arrays)
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Tokens(np.concatenate([*parts, np.empty(0, np.uint32)]).astype(np.uint32, copy=False), offsets)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several batches of texts as those of one."""
    masks = [part.mask for part in parts if part.mask is not None]
    lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(part.offsets) for part in parts)])
    ids = np.concatenate([np.empty(0, np.uint32), *(part.ids for part in parts)])
    return Tokens(ids, running_sums(lengths), np.concatenate(masks) if masks else None)


def import_ahead(loading: Future[Tokenizer]) -> None:
    """Import what the fast engine of a tokenizer needs, if it has one: half a second, spent while the caller has other work."""
    if loading.exception() is None and loading.result().make_fast is not None:
        importlib.import_module(AWKWARD)


AWKWARD = "awkward"
SMALL_BATCH = 1 << 16
"""Bytes of a batch that are encoded text by text, which holds Python's lock: two milliseconds are saved."""
FEW_BYTES = 4 << 20
"""Bytes that are encoded so where nothing has imported the library that the other way needs."""


def gigatoken_encode(tokenizer: Any) -> Encode:
    """The fast engine over Arrow's own buffers."""
    left = FEW_BYTES

    def encode(texts: pa.LargeStringArray) -> Tokens:
        nonlocal left
        data, offsets = text_buffers(texts)
        count = int(offsets[-1] - offsets[0]) + len(texts)
        left -= count
        if count <= SMALL_BATCH or (left > 0 and AWKWARD not in sys.modules):
            return concatenate(tokenizer.encode(data[start:stop].tobytes()) for start, stop in pairwise(offsets.tolist()))
        import awkward as ak  # it takes half a second, for which the other way takes some MB of text

        characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), characters, parameters={"__array__": "string"})
        # parallel=False: the task runner already has a thread for every core.
        layout = tokenizer.encode_batch(ak.Array(strings), parallel=False).layout
        ids, starts = np.asarray(layout.content.data), np.asarray(layout.offsets)
        return Tokens(ids[starts[0] : starts[-1]], starts - starts[0])

    return encode


def first_difference(texts: Iterable[str], one: Encode, other: Encode) -> str | None:
    """The first text that two engines tokenize differently, given all at once, shortened for people; None if they agree."""
    compared = list(texts)
    array = large_string_array(*compared)
    found, others = one(array), other(array)
    for i, text in enumerate(compared):
        if not np.array_equal(ids_of(found, i), ids_of(others, i)):
            return text if len(text) <= 60 else f"{text[:57]}..."
    return None


def ids_of(tokens: Tokens, i: int) -> UInt32s:
    """The tokens of text *i*."""
    return tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]


class UnencodableError(ValueError):
    """An engine does not take some of the texts."""


class Refusal(str):
    """Why a text has no tokens. ``reason``: the name under which it is counted."""

    reason: str

    def __new__(cls, detail: str, reason: str) -> Self:
        made = super().__new__(cls, detail)
        made.reason = reason
        return made


class TooSlowError(ValueError):
    """An engine does not come to an end."""


class EnginesDifferError(ValueError):
    """The fast engine has given a document other tokens than the reference engine."""


def is_visible(character: str) -> bool:
    """Whether a text has a letter, a number, a punctuation mark or a symbol that does not look like a space. Accents do not
    count: many tokenizers remove them, with the space under some of them.
    """
    parts = unicodedata.normalize("NFKD", character)
    return character not in LIKE_A_SPACE and any(unicodedata.category(part)[0] in "LNPS" for part in parts)


LIKE_A_SPACE = "\u115f\u1160\u2581\u2800\u3164\uffa0\ufffd"


def with_timeout(encode: Encode, config: TokenizerConfig) -> Encode:
    """The engine of a tokenizer that a file defines. TooSlowError if it takes too long; its thread cannot be ended, but does
    not keep the process from ending. UnencodableError if a visible text has no tokens.
    """

    def encode_and_watch(texts: pa.LargeStringArray) -> Tokens:
        future: Future[Tokens] = Future()

        def work() -> None:
            try:
                future.set_result(encode(texts))
            except BaseException as error:  # noqa: BLE001  it is raised below
                future.set_exception(error)

        seconds = 10 * config.max_seconds * max(1.0, texts.nbytes / (8 << 20))
        threading.Thread(target=work, name="encode", daemon=True).start()
        if not wait([future], seconds).done:
            raise TooSlowError(
                f"tokenizer {config.name!r} takes more than {seconds:.0f} seconds for {texts.nbytes:,} bytes of text. Its "
                "pattern may go back again and again: use another one, or raise tokenizer.max_seconds."
            )
        tokens = future.result()
        without = (np.diff(tokens.offsets) == 0) & (np.diff(text_buffers(texts)[1]) > 0)
        if not config.lossy and any(any(map(is_visible, texts[int(i)].as_py())) for i in np.flatnonzero(without)):
            raise UnencodableError("it has no tokens for any of it; tokenizer.lossy allows that")
        return tokens

    return encode_and_watch


def all_errors_as_unencodable(encode: Encode) -> Encode:
    """The same engine, whose every failure is an UnencodableError: libraries panic in Rust, which does not raise an Exception."""

    def encode_or_say_why(texts: pa.LargeStringArray) -> Tokens:
        try:
            return encode(texts)
        except (KeyboardInterrupt, SystemExit, MemoryError, UnencodableError, TooSlowError):
            raise
        except BaseException as error:
            raise UnencodableError(f"{type(error).__name__}: {error}") from error

    return encode_or_say_why


@dataclass
class _Instance:
    """A thread's instance of the fast engine. ``encode``: None before it is made; ``byte_count``: of the texts that it has seen;
    ``look_at``: how many there are when the memory is looked at; ``lock``: held while it tokenizes.
    """

    encode: Encode | None = None
    byte_count: int = 0
    look_at: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Engine:
    """The engine that a build uses: the fast one, one instance a thread and bounded in memory, or the reference."""

    def __init__(self, tokenizer: Tokenizer, fast: bool) -> None:
        self.name = "fast" if fast else "reference"
        self._tokenizer = tokenizer
        self._spare: list[Encode] = []
        self._lock = threading.Lock()
        self._instances: weakref.WeakKeyDictionary[threading.Thread, _Instance] = weakref.WeakKeyDictionary()

    def keep_ready(self, instance: Encode) -> None:
        """Take an instance that is made already, for the first thread that needs one. One that was put by before is dropped."""
        self._spare[:] = [instance]

    def take_ready(self, make_fast: Callable[[], Encode]) -> Encode:
        """The instance that was put by, else a new one."""
        with contextlib.suppress(IndexError):  # another thread may have taken it
            return self._spare.pop()
        return all_errors_as_unencodable(make_fast())

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        """Tokens of all texts together. UnencodableError if the engine does not take one of them."""
        if self.name == "reference" or self._tokenizer.make_fast is None:
            return all_errors_as_unencodable(self._tokenizer.reference)(texts)
        if _this_thread.replaced is not None:
            _this_thread.replaced.append(self._tokenizer.name)
            return all_errors_as_unencodable(self._tokenizer.reference)(texts)
        with self._lock:
            mine = self._instances.setdefault(threading.current_thread(), _Instance())
        with mine.lock:
            return self._encode(mine, texts)

    def _encode(self, by: _Instance, texts: pa.LargeStringArray) -> Tokens:
        """The tokens of texts by an instance that is locked."""
        assert self._tokenizer.make_fast is not None
        if by.encode is None or (by.byte_count > by.look_at and resident_bytes() > resident_limit(len(self._instances))):
            # An instance remembers every word that it has seen, without end: one whose share of the memory is used up
            # starts again. Dropping the old one first keeps two from standing side by side.
            by.encode = None
            by.encode, by.byte_count, by.look_at = self.take_ready(self._tokenizer.make_fast), 0, RENEW_AFTER_BYTES
        by.look_at += LOOK_AGAIN_BYTES if by.byte_count > by.look_at else 0
        by.byte_count += texts.nbytes
        try:
            return by.encode(texts)
        except BaseException:
            by.encode = None  # what a failure has left of an instance is not used again
            raise

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        """Tokens of each text alone, or why there are none. Where the fast engine fails, the reference decides."""
        for i in range(len(texts)):
            text = texts.slice(i, 1)
            try:
                try:
                    yield self(text)
                except UnencodableError:
                    yield all_errors_as_unencodable(self._tokenizer.reference)(text)
            except UnencodableError as error:
                yield f"tokenizer {self._tokenizer.name!r} cannot encode the document ({error})"

    def forget(self) -> None:
        """Drop the instances that no thread is tokenizing with, and what was put by."""
        self._spare.clear()
        with self._lock:
            idle = [self._instances.pop(thread) for thread, one in list(self._instances.items()) if not one.lock.locked()]
        idle.clear()  # which takes long, and no thread waits for it


class _ThisThread(threading.local):
    """``replaced``: names of tokenizers whose fast engine the reference has replaced; None if it is not to do so."""

    replaced: list[str] | None = None


_this_thread = _ThisThread()


def by_reference(encoder: Encoder, texts: pa.LargeStringArray) -> tuple[str, Tokens] | None:
    """The tokens of an encoder with the reference in place of its fast engine, after the tokenizer's name. None if it has no
    fast engine, or the reference cannot encode the texts.
    """
    _this_thread.replaced = replaced = list[str]()
    try:
        tokens = encoder(texts)
    except (UnencodableError, TooSlowError):
        return None
    finally:
        _this_thread.replaced = None
    return (replaced[0], tokens) if replaced else None


RENEW_AFTER_BYTES = 32 << 20
LOOK_AGAIN_BYTES = 8 << 20
"""After so much more text the memory is looked at again, for which the system counts the pages of all threads."""
THREAD_BYTES = 550 << 20
"""Memory that a thread's engine may fill, with all else that the thread holds."""
_processes = 1


def share_memory(processes: int) -> None:
    """Say that so many processes of this machine tokenize at the same time."""
    global _processes
    _processes = processes


def resident_limit(threads: int) -> int:
    """Anonymous memory that this process may use before its engines drop their caches: THREAD_BYTES for each of its threads, at
    least for two if it is the only process. All processes together use at most half of the memory of the machine or the
    container.
    """
    return min(THREAD_BYTES * max(threads, 2 if _processes == 1 else 1), available_memory() // 2 // _processes)


def resident_bytes() -> int:
    """Anonymous memory of this process; if the system does not tell, enough to renew after each stretch of text."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


_engines: dict[tuple[object, ...], Engine] = {}
_engines_lock = threading.Lock()


def engine_of(tokenizer: Tokenizer, fast: bool) -> Engine:
    """The process's engine for a tokenizer: what it has learned of a language is worth keeping between slices."""
    with _engines_lock:
        return _engines.setdefault((tokenizer.digest, tokenizer.limits, fast), Engine(tokenizer, fast))


def forget_what_was_learned() -> None:
    """Give back the memory of engines that no thread is at work with. They begin again when they are wanted."""
    with _engines_lock:
        engines = list(_engines.values())
    for engine in engines:
        engine.forget()


_faults: dict[tuple[object, ...], str | None] = {}
"""Why the fast engine is not used for a tokenizer, by what was tried before there was a text; None if it is."""


def try_fast_engine(tokenizer: Tokenizer, preference: str, processors: int) -> None:
    """Try the fast engine before there is a text. Where it cannot be used, a warning says why, and what a gigabyte will cost."""
    if not _is_wanted(tokenizer, preference):
        return
    if tokenizer.make_fast is not None:
        importlib.import_module(AWKWARD)  # it is tried as it is used for much text
    _faults[tokenizer.digest, tokenizer.limits] = fault = _fault_on(tokenizer, defined_texts(tokenizer))
    if fault is not None:
        topics: dict[str, str] = {}
        with contextlib.suppress(ImportError):  # some installations have no help
            from pydoc_data.topics import topics
        cost = cost_of_reference(tokenizer, [topic[:SAID_OF_A_TOPIC] for topic in topics.values()], 10**9, processors)
        logger.warning(SLOW, fault, cost.replace("the first documents", "a text in English"))


def was_tried(tokenizer: Tokenizer) -> bool:
    """Whether the fast engine was tried before there was a text."""
    return (tokenizer.digest, tokenizer.limits) in _faults


def may_use_fast_engine(
    tokenizer: Tokenizer, preference: str, samples: Sequence[str], text_bytes: int = 0, processors: int = 1
) -> bool:
    """Whether there is a fast engine that gives the reference's tokens on *samples* and on the texts for its definition. A
    difference is a warning that shows the text, and what the reference engine will cost: the build goes on, slower and right.
    """
    if not _is_wanted(tokenizer, preference):
        return False
    known = _faults.get((tokenizer.digest, tokenizer.limits))
    fault = known or _fault_on(tokenizer, [*samples, *(() if was_tried(tokenizer) else defined_texts(tokenizer))])
    if fault is None:
        # Give the system back what loading and trying have left: the C library would keep it for the threads that did so.
        with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        return True
    logger.warning(SLOW, fault, cost_of_reference(tokenizer, samples, text_bytes, processors))
    return False


def defined_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts on which engines are compared whatever the sources hold."""
    return [*awkward_texts(), *tokenizer.probes()]


SLOW = "The fast engine %s. Using the slower reference engine%s."


def _is_wanted(tokenizer: Tokenizer, preference: str) -> bool:
    return preference == "auto" and (tokenizer.make_fast is not None or tokenizer.why_slow is not None)


def _fault_on(tokenizer: Tokenizer, texts: Sequence[str]) -> str | None:
    """Why the fast engine is not used: there is none, or it does not take the texts as the reference does. None: it is."""
    if tokenizer.make_fast is None:
        return f"does not know {tokenizer.name}: {tokenizer.why_slow}"
    engine = engine_of(tokenizer, True)
    try:
        fast = engine.take_ready(tokenizer.make_fast)
        text = first_difference(texts, fast, all_errors_as_unencodable(tokenizer.reference))
        if text is None:
            engine.keep_ready(fast)
            return None
        difference = repr(text)
    except Exception as error:  # noqa: BLE001  # an engine that cannot load this, or stumbles over a text, is not used
        words = str(error) if isinstance(error, UnencodableError) else f"{type(error).__name__}: {error}"
        difference = f"some texts ({' '.join(words.split())[:200]})"
    return f"does not give the tokens of {tokenizer.name} on {difference}"


def cost_of_reference(tokenizer: Tokenizer, samples: Sequence[str], text_bytes: int, processors: int) -> str:
    """The cost of the reference engine, as it takes *samples*: the end of a sentence, which is empty if they tell nothing."""
    texts = large_string_array(*samples)
    begun, begun_here = time.monotonic(), time.thread_time()
    with contextlib.suppress(UnencodableError):
        all_errors_as_unencodable(tokenizer.reference)(texts)
        seconds, here = time.monotonic() - begun, time.thread_time() - begun_here
        # Some engines have threads of their own, and other threads of this process may be at work.
        spent = here if here > seconds / 2 else seconds * processors
        if spent and texts.nbytes > LEAST_TIMED:
            speed = texts.nbytes / spent
            low, high = (f"{of_fast / speed:.0f}" for of_fast in FAST_SPEEDS)
            remaining = f"{duration(text_bytes / speed / processors)} for {size(text_bytes)} with {processors} processors"
            return (
                f": about {speed / 1e6:.1f} MB of text a second and processor, by the first documents. That is {low} to {high} "
                f"times slower, about {remaining}"
            )
    return ""


FAST_SPEEDS = (13e6, 140e6)
"""Bytes of text that the fast engine takes a second and thread, by the tokenizer: docs/measured/benchmarks.md, its first pass."""
LEAST_TIMED = 10_000
"""Bytes of text, at least, of which the time says anything."""
SAID_OF_A_TOPIC = 1000
"""Characters of each topic of Python's help that stand for a text which is not here yet."""


def tokens_of(
    batch: TextBatch, slice_: Slice, source: Source, policy: DocumentPolicy, engine: Encoder, tally: Tally
) -> tuple[TokenBatch, TextBatch]:
    """The tokens of some documents of a slice, with those that the engine takes; *tally* counts along. A document that it does
    not take is a bad document: ValueError, or left out and counted. EnginesDifferError if a sample shows that the fast engine
    does not give the reference's tokens.
    """
    try:
        taken, tokens = batch, engine(batch.texts)
    except UnencodableError:
        taken, tokens = _encodable(batch, slice_, source, policy, engine, tally)
    for i in sampled(taken.keys):
        if fault := _difference(taken.texts.slice(i, 1), ids_of(tokens, i), engine):
            row = int(fact(taken.rows, ROW)[i])
            raise EnginesDifferError(
                f"{row_name(slice_, source, row)}: {fault}. Nothing is published. Set tokenizer.engine: "
                "reference. Tokens of earlier versions may differ, too."
            )
    encoded = TokenBatch.from_flat(
        tokens.ids if tokens.ids.flags.writeable else tokens.ids.copy(), tokens.offsets.astype(np.uint64)
    )
    return encoded._replace(loss_mask=tokens.mask), taken


SAMPLED_ONE_IN = 10_000
"""One document of so many goes through both engines."""
SAMPLED_BYTES = 1 << 20
"""Bytes of a document that do so, at most: the reference engine is slow, and takes a hundred times the memory."""
SAMPLE_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def sampled(keys: UInt64s) -> list[int]:
    """The documents of a batch that go through both engines, by a hash of their keys."""
    chosen: list[int] = np.flatnonzero(keys * SAMPLE_FACTOR <= np.uint64((1 << 64) // SAMPLED_ONE_IN - 1)).tolist()
    return chosen


def _difference(text: pa.LargeStringArray, ids: UInt32s, encoder: Encoder) -> str | None:
    """The difference between the tokens of one text and those of the reference engine, as a sentence. None if there is none, or
    they cannot be compared.
    """
    if text.nbytes > SAMPLED_BYTES:
        if not isinstance(encoder, Engine):
            return None  # the text is several in one
        text = large_string_array(text[0].as_buffer().to_pybytes()[:SAMPLED_BYTES].decode(errors="ignore"))
        ids = encoder(text).ids
    found = by_reference(encoder, text)
    if found is None or np.array_equal(ids, found[1].ids):
        return None
    name, expected = found[0], found[1].ids
    shorter = min(len(ids), len(expected))
    k = next(iter(np.flatnonzero(ids[:shorter] != expected[:shorter])), shorter)
    one, other = (str(some[k]) if k < len(some) else "missing" for some in (ids, expected))
    return f"the fast engine does not give the tokens of {name} (token {k} is {one}, the reference engine's {other})"


def _encodable(
    batch: TextBatch, slice_: Slice, source: Source, policy: DocumentPolicy, engine: Encoder, tally: Tally
) -> tuple[TextBatch, Tokens]:
    """The documents of a refused batch that the engine accepts one by one, with their tokens."""
    keep, taken, refused = np.ones(len(batch.texts), bool), list[Tokens](), list[tuple[int, str, str]]()
    for i, tokens in enumerate(engine.one_by_one(batch.texts)):
        if not isinstance(tokens, str):
            taken.append(tokens)
            continue
        reason = tokens.reason if isinstance(tokens, Refusal) else "unencodable"
        if policy.on_bad == "error":
            raise bad_document(slice_, source, int(fact(batch.rows, ROW)[i]), reason, tokens)
        keep[i] = False
        refused.append((i, reason, tokens))
        tally.written -= 1
        tally.text_bytes -= len(batch.texts[i].as_buffer())
    tally.leave_out(batch.rows, by_reason(refused))
    return batch.those(keep), joined(taken)
