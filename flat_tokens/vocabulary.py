"""Vocabularies: the bytes that token ids stand for, whoever's tokenizer they belong to, and text to ids again.

Every vocabulary is a flat table of bytes, so that whole batches of ids are decoded without a Python object per token.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra

UNKNOWN = "\ufffd".encode()
"""What an id decodes to that the vocabulary does not have."""

MAX_TABLE_IDS = 1 << 26

Encode = Callable[[str], npt.NDArray[np.uint32]]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token id: id i stands for ``data[offsets[i]:offsets[i + 1]]``, uint8[n], int64[size + 1].

    ``digest``: of every byte that decides its tokens, as builds write it into manifests. ``encode``: text to ids, with
    text that looks like a special token taken for text; None where the way is not known.
    """

    name: str
    digest: str | None
    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    encode: Encode | None

    @classmethod
    def of(cls, name: str, digest: str | None, pieces: Mapping[int, bytes], encode: Encode | None) -> Vocabulary:
        """From the bytes of each id; ids in between that have none stand for nothing."""
        size = max(pieces, default=-1) + 1
        if size > MAX_TABLE_IDS or min(pieces, default=0) < 0:
            raise ValueError(f"{name}: has token ids up to {size - 1}; up to {MAX_TABLE_IDS - 1} are decoded here")
        lengths = np.zeros(size, np.int64)
        ids = np.fromiter(pieces, np.int64, len(pieces))
        lengths[ids] = np.fromiter(map(len, pieces.values()), np.int64, len(pieces))
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(name, digest, np.frombuffer(b"".join(pieces[i] for i in sorted(pieces)), np.uint8), offsets, encode)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each id: int64[size]; 0 where it stands for nothing."""
        return np.diff(self.offsets)

    def piece(self, i: int) -> bytes:
        """The bytes of one id, or those of U+FFFD where it stands for nothing."""
        return self._table[0][self._table[1][min(i, self.size)] : self._table[1][min(i, self.size) + 1]].tobytes()

    def decode(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The bytes of ids, one behind the other, and where each id's bytes end: bytes, int64[len(ids)]."""
        data, offsets = self._table
        ids = np.minimum(ids, ids.dtype.type(min(self.size, np.iinfo(ids.dtype).max))).astype(np.int64)
        starts, lengths = offsets[ids], offsets[ids + 1] - offsets[ids]
        ends = np.cumsum(lengths)
        # byte k of the text -> byte k - (end - length) of its token's piece
        index = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        index += np.repeat(starts - (ends - lengths), lengths)
        return data[index].tobytes(), ends

    @cached_property
    def _table(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """``data`` and ``offsets`` with U+FFFD for each id that stands for nothing, and for one more behind the last."""
        lengths = np.append(self.lengths, 0)
        unknown = lengths == 0
        lengths[unknown] = len(UNKNOWN)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), np.uint8)
        is_unknown = np.repeat(unknown, lengths)
        data[~is_unknown] = self.data
        data[is_unknown] = np.tile(np.frombuffer(UNKNOWN, np.uint8), int(unknown.sum()))
        return data, offsets


def load_vocabulary(name_or_path: str, *, pattern: str | None = None, revision: str | None = None) -> Vocabulary:
    """The vocabulary of a tiktoken encoding, of ``bytes``, of a ``.tiktoken`` file, of a ``tokenizer.json`` or a directory
    with one, or of a hub repository.

    *pattern*: for ``.tiktoken`` files, the pattern that splits text, or the tiktoken encoding whose it is; without it the
    vocabulary decodes but does not encode. ValueError, with the next step, where the name means nothing;
    ModuleNotFoundError where a package is not installed.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path == "bytes":
        return _bytes()
    if path.suffix == ".tiktoken":
        return _ranks(path, pattern)
    if path.suffix == ".json" or path.is_dir():
        return _tokenizer_json(name_or_path, _read(path / "tokenizer.json" if path.is_dir() else path))
    if name_or_path.count("/") == 1 and not path.is_absolute() and ".." not in path.parts:
        return _tokenizer_json(name_or_path, _from_hub(name_or_path, revision))
    tiktoken = extra("tiktoken", f"the tokenizer {name_or_path!r}")
    if name_or_path in tiktoken.list_encoding_names():
        return _of_encoding(name_or_path, _encoding(tiktoken, name_or_path))
    raise ValueError(
        f"there is no tokenizer {name_or_path!r}; there are {', '.join(tiktoken.list_encoding_names())}, bytes, .tiktoken files, "
        "tokenizer.json files or their directories, and hub repositories such as openai-community/gpt2"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def _bytes() -> Vocabulary:
    """Byte value + 1."""

    def encode(text: str) -> npt.NDArray[np.uint32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + np.uint32(1)

    pieces = {value + 1: bytes([value]) for value in range(256)}
    return Vocabulary.of("bytes", hashlib.sha256(b"bytes: value + 1").hexdigest(), pieces, encode)


def _encoding(tiktoken: Any, name: str) -> Any:
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raised: the name is right, the vocabulary cannot be had
        raise ValueError(
            f"the vocabulary of {name!r} cannot be loaded ({type(error).__name__}). Without a network, set TIKTOKEN_CACHE_DIR to "
            "a directory that has it, or name a .tiktoken file."
        ) from error


def _of_encoding(name: str, encoding: Any) -> Vocabulary:
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    special = {i: text.encode() for text, i in encoding._special_tokens.items()}

    def encode(text: str) -> npt.NDArray[np.uint32]:
        return np.array(encoding.encode_ordinary(text), np.uint32)

    digest = _ranks_digest(encoding._pat_str, ranks)
    return Vocabulary.of(name, digest, {i: token for token, i in ranks.items()} | special, encode)


def _ranks_digest(pattern: str, ranks: Mapping[bytes, int]) -> str:
    lines = (b"%s %d\n" % (base64.b64encode(token), i) for token, i in sorted(ranks.items(), key=lambda item: item[1]))
    return hashlib.sha256(pattern.encode() + b"\0" + b"".join(lines)).hexdigest()


def _ranks(path: Path, pattern: str | None) -> Vocabulary:
    """A file of lines 'base64 rank'."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not 'base64 rank' ({error})") from error
        if not 0 <= rank <= MAX_TOKEN_ID:
            raise ValueError(f"{path}, line {number}: token id {rank} is not one of 0 to {MAX_TOKEN_ID}")
        ranks[token] = rank
    if pattern is None:
        return Vocabulary.of(path.name, None, {i: token for token, i in ranks.items()}, None)
    tiktoken = extra("tiktoken", f"encoding with {path.name}")
    if pattern in tiktoken.list_encoding_names():
        pattern = str(_encoding(tiktoken, pattern)._pat_str)
    try:
        encoding = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used with pattern {pattern!r}: {error}") from error
    return _of_encoding(path.name, encoding)


def _from_hub(repository: str, revision: str | None) -> bytes:
    hub = extra("huggingface_hub", f"the tokenizer {repository} of the hub")
    try:
        return Path(hub.hf_hub_download(repository, "tokenizer.json", revision=revision)).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer {repository!r} cannot be had from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or name a tokenizer.json."
        ) from error


def _tokenizer_json(name: str, data: bytes) -> Vocabulary:
    tokenizers = extra("tokenizers", f"the tokenizer {name}")
    try:
        definition = json.loads(data)
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{name} is not a tokenizer.json that 'tokenizers' {tokenizers.__version__} loads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    added = {token["content"] for token in definition.get("added_tokens") or []}
    bytes_of = _bytes_of_tokens(definition)
    pieces = {
        int(i): token.encode() if token in added else bytes_of(token)
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items()
    }

    def encode(text: str) -> npt.NDArray[np.uint32]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    return Vocabulary.of(name, hashlib.sha256(data).hexdigest(), pieces, encode)


def _bytes_of_tokens(definition: dict[str, Any]) -> Callable[[str], bytes]:
    """How a token as a tokenizer.json spells it becomes the bytes that it stands for."""
    decoders = list(_flat(definition.get("decoder")))
    kinds = {decoder.get("type") for decoder in decoders}
    if "ByteLevel" in kinds | {part.get("type") for part in _flat(definition.get("pre_tokenizer"))}:
        values = {character: value for value, character in enumerate(_byte_level_alphabet())}
        return lambda token: b"".join(
            bytes([values[character]]) if character in values else character.encode() for character in token
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


def _flat(part: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """A decoder or pre-tokenizer, or those that a sequence is made of."""
    for inner in (part or {}).get("decoders") or (part or {}).get("pretokenizers") or ([part] if part else []):
        yield from _flat(inner) if inner.get("type") == "Sequence" and inner is not part else [inner]


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else one above U+00FF, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(value if value in seen else next(hidden)) for value in range(256)]
