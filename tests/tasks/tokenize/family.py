"""A family of tokenizer.json files with the options that published tokenizers use, in all pairs; and texts for each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

from flat_tokens.vocabulary import byte_level_alphabet
from tasks.tokenize.characters import UNICODE_17, UNICODE_17_SYMBOLS
from tasks.tokenize.fast_json import DEEPSEEK, GPT2, GPT4O, LLAMA3, NEMOTRON, QWEN2, QWEN35

Definition = dict[str, Any]
ALPHABET = byte_level_alphabet()
LETTERS = "aabcdeeioust ABS.,'-!123\n\té中ß"


@dataclass(frozen=True)
class Member:
    """A tokenizer of the family. ``is_known``: the fast engine is expected to encode it. ``define``: makes the definition,
    which takes too long to be done for all members when tests are collected.
    """

    name: str
    define: Callable[[], Definition]
    is_known: bool
    added: list[Definition] = field(default_factory=list)

    @cached_property
    def definition(self) -> Definition:
        return self.define()


def split(pattern: str | Mapping[str, str], behavior: str = "Isolated", *, invert: bool = False) -> Definition:
    spelled = {"Regex": pattern} if isinstance(pattern, str) else dict(pattern)
    return {"type": "Split", "pattern": spelled, "behavior": behavior, "invert": invert}


def bytes_(*, space: bool = False, regex: bool = False, **others: Any) -> Definition:
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": False, "use_regex": regex, **others}


def sequence(*steps: Definition, of: str = "pretokenizers") -> Definition:
    return {"type": "Sequence", of: list(steps)}


def metaspace(scheme: str = "always", replacement: str = "▁", **others: Any) -> Definition:
    return {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, **others}


def replace(pattern: Mapping[str, str], content: str) -> Definition:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}


SPACES = replace({"String": " "}, "▁")
PREPEND = {"type": "Prepend", "prepend": "▁"}

KNOWN_BYTE_LEVEL: dict[str, Definition | None] = {
    "bytes": bytes_(regex=True),
    "bytes, space": bytes_(regex=True, space=True),
    "bytes by default": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "bytes in a sequence": sequence(bytes_(regex=True)),
    **{
        f"{name}, {behavior}": sequence(split(pattern, behavior, invert=invert), bytes_())
        for name, pattern in {
            "gpt2": GPT2,
            "llama3": LLAMA3,
            "qwen2": QWEN2,
            "qwen35": QWEN35,
            "gpt4o": GPT4O,
            "nemotron": NEMOTRON,
        }.items()
        for behavior, invert in (("Isolated", False), ("Removed", True))
    },
    "deepseek": sequence(*map(split, DEEPSEEK), bytes_()),
}
UNKNOWN_BYTE_LEVEL: dict[str, Definition | None] = {
    "bytes without regex": bytes_(),
    "bytes without regex, space": bytes_(space=True),
    **{f"qwen2, {behavior}": sequence(split(QWEN2, behavior), bytes_()) for behavior in ("Removed", "MergedWithNext")},
    **{f"gpt2, {behavior}": sequence(split(GPT2, behavior), bytes_()) for behavior in ("MergedWithPrevious", "Contiguous")},
    "llama3, inverted": sequence(split(LLAMA3, invert=True), bytes_()),
    "llama3, then bytes with regex": sequence(split(LLAMA3), bytes_(regex=True)),
    "llama3, then bytes with space": sequence(split(LLAMA3), bytes_(space=True)),
    "gpt4 without its end": sequence(
        split(LLAMA3.replace(r"\s*[\r\n]+", r"\s*[\r\n]")),
        bytes_(),
    ),
    # Behind an interval ``tokenizers`` takes a plus for a repetition.
    "gpt4 of tiktoken": sequence(
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
            r"\s+(?!\S)|\s+"
        ),
        bytes_(),
    ),
    "own pattern": sequence(split(r"\w+|\W"), bytes_()),
    "text": sequence(split({"String": "a"}), bytes_(regex=True)),
    "deepseek in another order": sequence(*map(split, reversed(DEEPSEEK)), bytes_()),
    "deepseek, two of three": sequence(*map(split, DEEPSEEK[1:]), bytes_()),
    "two patterns": sequence(split(QWEN2), split(GPT2), bytes_()),
    "digits": sequence({"type": "Digits", "individual_digits": True}, bytes_(regex=True)),
    "digits after": sequence(split(QWEN2), bytes_(), {"type": "Digits", "individual_digits": False}),
    "digits before": sequence({"type": "Digits", "individual_digits": False}, split(QWEN2), bytes_()),
    "falcon": sequence(
        {"type": "Punctuation", "behavior": "Contiguous"},
        bytes_(regex=True),
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ),
    "bytes twice": sequence(bytes_(regex=True), bytes_()),
    **{
        name: sequence({"type": name, **options}, bytes_())
        for name, options in {
            "Whitespace": {},
            "WhitespaceSplit": {},
            "BertPreTokenizer": {},
            "UnicodeScripts": {},
            "CharDelimiterSplit": {"delimiter": "a"},
            "Punctuation": {"behavior": "Isolated"},
            "FixedLength": {"length": 5},
        }.items()
    },
    "metaspace, then bytes": sequence(metaspace(), bytes_()),
    "pattern without bytes": split(QWEN2),
    "no pre-tokenizer": None,
}
KNOWN_NORMALIZERS: dict[str, Definition | None] = {
    "": None,
    "NFC": {"type": "NFC"},
    "NFC in a sequence": sequence({"type": "NFC"}, of="normalizers"),
    "no steps": sequence(of="normalizers"),
}
UNKNOWN_NORMALIZERS: dict[str, Definition] = {
    **{kind: {"type": kind} for kind in ("NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")},
    "Strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "Strip left": {"type": "Strip", "strip_left": True, "strip_right": False},
    "Prepend": {"type": "Prepend", "prepend": "a"},
    "Replace": replace({"String": "a"}, "b"),
    "Replace spaces": replace({"Regex": " {2,}"}, " "),
    "Bert": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": False,
    },
    "NFC, Lowercase": sequence({"type": "NFC"}, {"type": "Lowercase"}, of="normalizers"),
    "Replace, NFC": sequence(replace({"String": "e"}, "o"), {"type": "NFC"}, of="normalizers"),
}
KNOWN_WITH_SPACES: dict[str, tuple[Definition | None, Definition | None]] = {
    "llama2": (sequence(PREPEND, SPACES, of="normalizers"), None),
    "spaces": (SPACES, None),
    "gemma": (SPACES, split({"String": " "}, "MergedWithPrevious")),
    **{f"metaspace, {scheme}": (None, metaspace(scheme)) for scheme in ("first", "always", "never")},
    **{f"metaspace, {scheme}, whole": (None, metaspace(scheme, split=False)) for scheme in ("first", "always", "never")},
    "metaspace of old": (None, {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "str_rep": "▁"}),
    "metaspace in a sequence": (None, sequence(metaspace("first"))),
}
UNKNOWN_WITH_SPACES: dict[str, tuple[Definition | None, Definition | None]] = {
    "nothing": (None, None),
    "replacement": (None, metaspace(replacement="_")),
    "llama2, metaspace": (sequence(PREPEND, SPACES, of="normalizers"), metaspace()),
    "spaces, metaspace": (SPACES, metaspace()),
    "prepend": (PREPEND, None),
    "spaces, prepend": (sequence(SPACES, PREPEND, of="normalizers"), None),
    "strip, spaces": (sequence({"type": "Strip", "strip_left": True, "strip_right": False}, SPACES, of="normalizers"), None),
    "NFKC, metaspace": ({"type": "NFKC"}, metaspace("first")),
    "collapsed, metaspace": (replace({"Regex": " {2,}"}, " "), metaspace()),
    "lowercase, spaces": (sequence({"type": "Lowercase"}, SPACES, of="normalizers"), None),
    "gemma, isolated": (SPACES, split({"String": " "})),
    "gemma without spaces": (None, split({"String": " "}, "MergedWithPrevious")),
    "digits, metaspace": (None, sequence({"type": "Digits", "individual_digits": True}, metaspace())),
    "metaspace, digits": (None, sequence(metaspace("first"), {"type": "Digits", "individual_digits": True})),
    "whitespace": (None, {"type": "WhitespaceSplit"}),
    "bytes": (None, bytes_()),
}


def added(content: str, **options: bool) -> Definition:
    of_token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **of_token, **options}


KNOWN_ADDED: dict[str, list[Definition]] = {
    "": [],
    "plain": [added("<tag>"), added("tea"), added("A1")],
    "special": [added("<|end|>", special=True), added("<s>", special=True, normalized=True), added("ca", special=True)],
    "left": [added("<l>", lstrip=True), added("<s>", special=True), added("se")],
    "right": [added("<r>", rstrip=True), added("<s>", special=True, rstrip=True, lstrip=True)],
    "both": [added("<b>", rstrip=True, lstrip=True), added("<l>", lstrip=True), added("<r>", rstrip=True)],
    "normalized": [added("<n>", normalized=True), added("bus", normalized=True), added("caf\u00e9", normalized=True)],
    "normalized, stripping": [added("<n>", normalized=True, lstrip=True, rstrip=True), added("<m>", normalized=True)],
    "overlapping": [added("aba"), added("bab"), added("ab"), added("ababa"), added("<<")],
    "spaces": [added("  "), added("    "), added("\n\n"), added("\t")],
    "special single word": [added("<w>", special=True, single_word=True), added("<x>", normalized=True)],
    "letters": [added("中"), added("e\u0301"), added("ß", normalized=True), added("\U0001f600")],
    "empty": [added(""), added("<x>")],
}
UNKNOWN_ADDED: dict[str, list[Definition]] = {
    "single word": [added("<tag>", single_word=True)],
    "single word, letters": [added("ab", single_word=True), added("se", single_word=True, normalized=True)],
    "single word, stripping": [added("<tag>", single_word=True, lstrip=True, rstrip=True)],
    "covered": [added("<tag>", special=True), added("tag")],
    "covered at the end": [added("<|a", special=True), added("ab")],
    "covered normalized": [added("cab", special=True, normalized=True), added("ab", normalized=True)],
    "stripping and spaces": [added("<l>", lstrip=True), added(" x")],
    "twice": [added("<x>", special=True), added("<x>")],
}
KNOWN_MODELS: dict[str, Definition] = {
    "": {},
    "whole words": {"ignore_merges": True},
    "unknown": {"unk_token": "<unk>", "fuse_unk": True},
    "no prefix": {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
    "bytes": {"byte_fallback": True},
    "many ways": {"many ways": True},
    "any order": {"any order": True},
    "gaps": {"gaps": True},
    "other characters": {"other characters": True},
    "lacks bytes that no text has": {"lacks": [0xC0, 0xF5, 0xFF]},
    "many ways, whole words": {"many ways": True, "any order": True, "ignore_merges": True},
}
UNKNOWN_MODELS: dict[str, Definition] = {
    "prefix": {"continuing_subword_prefix": "##"},
    "suffix": {"end_of_word_suffix": "</w>"},
    "lacks a byte": {"lacks": [0x07]},
    "lacks a byte, unknown": {"lacks": [0x07, 0xE4], "unk_token": "<unk>", "fuse_unk": True},
    "high ids": {"high": 1 << 25},
    "same id": {"same": True},
}
KNOWN_MODELS_WITH_SPACES = ("", "unknown", "no prefix", "many ways", "any order", "gaps", "crossing", "characters for bytes")
UNKNOWN_MODELS_WITH_SPACES = (
    *("whole words", "no bytes", "lacks a byte", "prefix", "suffix", "high ids", "same id", "merged bytes"),
    "bytes in small letters",
)


def merges_of(characters: Sequence[str], size: int, seed: str, *, many_ways: bool, longest: int = 7) -> list[tuple[str, str]]:
    """Merges of random tokens. *many_ways*: several may make the same token."""
    rng, tokens, made = random.Random(seed), list(characters), {}
    known = set(tokens)
    while len(made) < size:
        pair = rng.choice(tokens), rng.choice(tokens)
        both = "".join(pair)
        if len(both) > longest or pair in made or (both in known and not many_ways):
            continue
        made[pair] = both
        if both not in known:
            known.add(both)
            tokens.append(both)
    return list(made)


def model_of(characters: Sequence[str], options: Mapping[str, Any], letters: Sequence[str], seed: str) -> Definition:
    """A model of byte pairs, whose merges are of *letters*."""
    options = dict(options)
    names = ("many ways", "any order", "gaps", "other characters", "lacks", "high", "same")
    ours = {name: options.pop(name, None) for name in names}
    prefix, suffix = options.get("continuing_subword_prefix") or "", options.get("end_of_word_suffix") or ""
    merges = merges_of(letters, 400, seed, many_ways=bool(ours["many ways"]))
    rng = random.Random(seed)
    tokens = dict.fromkeys([*characters, *map("".join, merges)])
    if options.get("ignore_merges"):
        tokens |= dict.fromkeys("".join(rng.choices(letters, k=4)) for _ in range(100))
    if prefix or suffix:
        merges = []
        tokens |= dict.fromkeys(f"{prefix}{token}" for token in list(tokens))
        tokens |= dict.fromkeys(f"{token}{suffix}" for token in list(tokens))
        tokens |= dict.fromkeys(f"{prefix}{token}{suffix}" for token in characters)
    if "unk_token" in options:
        tokens["<unk>"] = None
    if ours["other characters"]:
        tokens |= dict.fromkeys(["中文", "Ж", "a中"])
        merges += [("Ж", "a"), ("a", "Ж")]
        tokens |= dict.fromkeys(["Жa", "aЖ"])
    ordered = list(tokens)
    if ours["any order"]:
        rng.shuffle(ordered)
    vocabulary = {token: i * (3 if ours["gaps"] else 1) for i, token in enumerate(ordered)}
    lacking = [characters[value] for value in ours["lacks"] or ()]
    vocabulary = {token: i for token, i in vocabulary.items() if not any(character in token for character in lacking)}
    merges = [pair for pair in merges if not any(character in "".join(pair) for character in lacking)]
    if ours["high"]:
        vocabulary[ordered[-1]] = ours["high"]
    if ours["same"]:
        vocabulary[ordered[-1]] = vocabulary[ordered[-2]]
    return {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges], **options}


def definition_of(
    normalizer: Any, pre_tokenizer: Any, model: Definition, tokens: Iterable[Definition], **others: Any
) -> Definition:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": numbered(tokens, model["vocab"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": model,
        **others,
    }


def numbered(tokens: Iterable[Definition], vocabulary: Any) -> list[Definition]:
    """Added tokens with the ids that ``tokenizers`` gives them."""
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {token: i for i, (token, _) in enumerate(vocabulary)}
    fresh = count(len(known))
    return [{**token, "id": known[token["content"]] if token["content"] in known else next(fresh)} for token in tokens]


BYTE_LETTERS = [ALPHABET[byte] for byte in LETTERS.encode()]
BYTE_TOKENS = [f"<0x{value:02X}>" for value in range(256)]
CHARACTERS = [*BYTE_TOKENS, *dict.fromkeys([*LETTERS, "▁"])]
CHARACTER_LETTERS = [letter.replace(" ", "▁") for letter in LETTERS]


def model_with_spaces(name: str, seed: str) -> Definition:
    """A model of characters that falls back to bytes."""
    options = KNOWN_MODELS.get(name) or UNKNOWN_MODELS.get(name) or {}
    letters = CHARACTER_LETTERS
    if name == "crossing":  # tokens with a space in their middle
        letters = [*letters, "a▁b", "s▁", ".▁"]
    model = model_of([*CHARACTERS, *dict.fromkeys(letters)], {"byte_fallback": True, **options}, letters, seed)
    vocabulary = model["vocab"]
    # A space is at the beginning of a token, as in published ones, unless tokens are to cross words.
    if name != "crossing":
        kept = [pair for pair in model["merges"] if "▁" not in "".join(pair).lstrip("▁")]
        gone = {"".join(pair) for pair in model["merges"]} - {"".join(pair) for pair in kept}
        model["vocab"] = vocabulary = {token: i for token, i in vocabulary.items() if token not in gone}
        model["merges"] = [pair for pair in kept if pair[0] in vocabulary and pair[1] in vocabulary]
    if name == "no bytes":
        model["byte_fallback"] = False
    if name == "characters for bytes":
        for token in ("<0x09>", "<0x61>", "<0xC1>"):
            del vocabulary[token]
    if name == "merged bytes":
        model["merges"].append(["<0xE4>", "a"])
        vocabulary["<0xE4>a"] = max(vocabulary.values()) + 1
    if name == "bytes in small letters":
        vocabulary["<0xe4>"] = max(vocabulary.values()) + 1
    return model


def byte_level_members() -> Iterator[Member]:
    """Known options in all pairs; each of the others in several places."""
    pres, norms, models, tokens = (list(of.items()) for of in (KNOWN_BYTE_LEVEL, KNOWN_NORMALIZERS, KNOWN_MODELS, KNOWN_ADDED))
    # As many of each as have no common factor: so every pair of two is met.
    assert [len(of) for of in (pres, norms, models, tokens)] == [17, 4, 11, 13]
    for i in range(17 * 13):
        yield _byte_level(i, pres[i % 17], norms[i % 4], models[i % 11], tokens[i % 13], is_known=i != 35)
    plain = pres[7], norms[0], models[0], tokens[1]
    for i, pre in enumerate(UNKNOWN_BYTE_LEVEL.items()):
        yield _byte_level(i, pre, norms[i % 4], models[i % 11], tokens[i % 13], is_known=False)
    for i, norm in enumerate(UNKNOWN_NORMALIZERS.items()):
        for pre in (pres[0], pres[4 + i % 13]):
            yield _byte_level(i, pre, norm, models[0], tokens[1 + i % 12], is_known=False)
    for i, model in enumerate(UNKNOWN_MODELS.items()):
        yield _byte_level(i, plain[0], plain[1], model, plain[3], is_known=False)
    for i, token in enumerate(UNKNOWN_ADDED.items()):
        for pre in (pres[0], pres[4 + i % 13]):
            yield _byte_level(i, pre, norms[i % 4], models[i % 6], token, is_known=False)
    mixed = [added("abc"), added("bcd", normalized=True)]
    yield _byte_level(0, *plain[:3], ("overlap, one normalized", mixed), is_known=False)
    yield _byte_level(0, pres[1], *plain[1:3], ("space", [added(" abc")]), is_known=False)
    same = [added("\u00e9", normalized=True), added("e\u0301", normalized=True)]
    yield _byte_level(0, plain[0], norms[1], plain[2], ("the same when normalized", same), is_known=False)


def _byte_level(i: int, pre: Any, norm: Any, model: Any, tokens: Any, *, is_known: bool) -> Member:
    name = f"bytes {i}: {', '.join(filter(None, (pre[0], norm[0], model[0], tokens[0])))}"

    def define() -> Definition:
        return definition_of(norm[1], pre[1], model_of(ALPHABET, model[1], BYTE_LETTERS, name), tokens[1])

    return Member(name, define, is_known, tokens[1])


def members_with_spaces() -> Iterator[Member]:
    ways, models, tokens = list(KNOWN_WITH_SPACES.items()), KNOWN_MODELS_WITH_SPACES, list(KNOWN_ADDED.items())
    assert [len(of) for of in (ways, models, tokens)] == [11, 8, 13]
    for i in range(11 * 13):
        yield _with_spaces(i, ways[i % 11], models[i % 8], tokens[i % 13], is_known=True)
    for i, way in enumerate(UNKNOWN_WITH_SPACES.items()):
        yield _with_spaces(i, way, models[i % 8], tokens[i % 13], is_known=False)
    for i, model in enumerate(UNKNOWN_MODELS_WITH_SPACES):
        yield _with_spaces(i, ways[i % 11], model, tokens[i % 13], is_known=False)
    for i, token in enumerate(UNKNOWN_ADDED.items()):
        yield _with_spaces(i, ways[i % 11], models[i % 8], token, is_known=False)
    same = [added("a b", normalized=True), added("a▁b", normalized=True)]
    yield _with_spaces(0, ways[1], models[0], ("the same when normalized", same), is_known=False)


def _with_spaces(i: int, way: Any, model: str, tokens: Any, *, is_known: bool) -> Member:
    name = f"spaces {i}: {', '.join(filter(None, (way[0], model, tokens[0])))}"
    return Member(name, lambda: definition_of(*way[1], model_with_spaces(model, name), tokens[1]), is_known, tokens[1])


def other_members() -> Iterator[Member]:
    """Other models, and what is beside the model."""
    words = dict.fromkeys([*LETTERS, "tea", "bus", "##s", "##e", "[UNK]"])
    vocabulary = {word: i for i, word in enumerate(words)}
    for name, model in {
        "WordLevel": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        "WordPiece": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "Unigram": {"type": "Unigram", "vocab": [[word, -1.0 - i] for i, word in enumerate(words)], "unk_id": 3},
    }.items():
        yield Member(name, partial(definition_of, None, {"type": "Whitespace"}, model, KNOWN_ADDED["plain"]), False)
    one, start = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    post = {"type": "TemplateProcessing", "pair": [one, {"Sequence": {"id": "B", "type_id": 0}}]}
    specials = {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}
    for name, single in {"template": [start, one], "template without text": [start], "text twice": [one, one]}.items():
        model = model_of(ALPHABET, {}, BYTE_LETTERS, name)
        processor = {**post, "single": single, "special_tokens": specials}
        definition = definition_of(None, bytes_(regex=True), model, KNOWN_ADDED["plain"], post_processor=processor)
        yield Member(name, partial(dict, definition), name == "template", KNOWN_ADDED["plain"])
    model = model_of(ALPHABET, {}, BYTE_LETTERS, "old")
    old = {**model, "merges": [" ".join(pair) for pair in model["merges"]]}
    del old["type"]
    yield Member("merges of old", partial(definition_of, None, bytes_(regex=True), old, []), True)
    twice = {**model, "merges": [*model["merges"], *model["merges"][:50]]}
    yield Member("merges twice", partial(definition_of, None, bytes_(regex=True), twice, []), False)
    definition = definition_of(None, bytes_(regex=True), model, KNOWN_ADDED["plain"])
    shifted = [{**token, "id": token["id"] + 7} for token in definition["added_tokens"]]
    yield Member("other ids", partial(dict, definition, added_tokens=shifted), True, KNOWN_ADDED["plain"])


def family() -> list[Member]:
    return [*byte_level_members(), *members_with_spaces(), *other_members()]


NEW = "".join(chr(point) for first, last in [*UNICODE_17, *UNICODE_17_SYMBOLS] for point in (first, last - 1))
FORMS = ("{}", "a{}b", " {} ", "a {} b", "{}{}", "{} {}", "\n{}\n", "{}a", "a{}", "1{}2", "\u00e9{}", "  {}  ", "{}.", "<{}>")
OTHERS = ("'s", "'S", "'ll", "'LL", "'Ve", "don't", "HTTPServer", "x=1;", "\r\n", "\0", "\ufeff", "/\n", "12345")


def texts(member: Member, characters: int, seed: int = 0) -> list[str]:
    """Texts of so many characters in all, of words, spaces, added tokens, tokens of the model, and characters of all scripts."""
    rng = random.Random(f"{member.name} {seed}")
    vocabulary = member.definition["model"]["vocab"]
    tokens = list(vocabulary) if isinstance(vocabulary, dict) else [token for token, _ in vocabulary]
    values = {character: value for value, character in enumerate(ALPHABET)}
    of_model = [
        bytes(values[one] for one in token).decode(errors="ignore") if set(token) <= set(ALPHABET) else token.replace("▁", " ")
        for token in tokens[-300:]
    ]
    of_added = [token["content"] for token in member.added] or ["<none>"]
    scripts = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x1100, 0x1200), (0x2000, 0x2100)]
    scripts += [(0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFF00, 0x10000), (0x1F300, 0x1F700), (0x10000, 0x110000)]

    def character() -> str:
        point = rng.randrange(*rng.choice(scripts))
        return "\ufffd" if 0xD800 <= point < 0xE000 else chr(point)

    def part() -> str:
        kind = rng.random()
        if kind < 0.35:
            return "".join(rng.choices(LETTERS, k=rng.randrange(1, 9)))
        if kind < 0.55:
            return "".join(rng.choices(of_model, k=rng.randrange(1, 4)))
        if kind < 0.75:
            return rng.choice(FORMS).replace("{}", rng.choice(of_added))
        if kind < 0.8:
            token = rng.choice(of_added)
            return token[rng.randrange(len(token) + 1) :] + token[: rng.randrange(len(token) + 1)]
        if kind < 0.86:
            return rng.choice(" \n\t\r\u00a0\u2003\u3000▁0123456789") * rng.randrange(1, 12)
        if kind < 0.9:
            return rng.choice(OTHERS)
        if kind < 0.9002:
            return rng.choice(NEW)
        return "".join(character() for _ in range(rng.randrange(1, 4)))

    found = []
    left = characters
    while left > 0:
        text = rng.choice(("", "", " ", "▁")).join(part() for _ in range(rng.choice((0, 1, 2, 5, 20, 100, 400))))
        found.append(text)
        left -= len(text) + 1
    return found


def write(member: Member) -> str:
    return json.dumps(member.definition)
