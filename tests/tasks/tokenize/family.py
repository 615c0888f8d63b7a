"""A family of tokenizer.json files with the options that published tokenizers use and that the fast engine knows, in all pairs;
and texts for each of them.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from flat_tokens.vocabulary import TokenizerJson, byte_level_alphabet
from tasks.tokenize.characters import UNICODE_17, UNICODE_17_SYMBOLS
from tasks.tokenize.fast_json import DEEPSEEK, PATTERNS

Definition = dict[str, Any]
ALPHABET = byte_level_alphabet()
LETTERS = "aabcdeeioust ABS.,'-!123\n\té中ß"


@dataclass(frozen=True)
class Member:
    """A tokenizer of the family. ``define``: makes the definition, which takes too long to be done for all members when tests
    are collected.
    """

    name: str
    define: Callable[[], Definition]
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

BYTE_LEVEL: dict[str, Definition | None] = {
    "bytes": bytes_(regex=True),
    "bytes, space": bytes_(regex=True, space=True),
    "bytes by default": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "bytes in a sequence": sequence(bytes_(regex=True)),
    **{
        f"pattern {i}, {behavior}": sequence(split(pattern, behavior, invert=invert), bytes_())
        for i, pattern in enumerate(PATTERNS)
        for behavior, invert in (("Isolated", False), ("Removed", True))
    },
    "deepseek": sequence(*map(split, DEEPSEEK), bytes_()),
}
NORMALIZERS: dict[str, Definition | None] = {
    "": None,
    "NFC": {"type": "NFC"},
    "NFC in a sequence": sequence({"type": "NFC"}, of="normalizers"),
    "no steps": sequence(of="normalizers"),
}
WITH_SPACES: dict[str, tuple[Definition | None, Definition | None]] = {
    "llama2": (sequence(PREPEND, SPACES, of="normalizers"), None),
    "spaces": (SPACES, None),
    "gemma": (SPACES, split({"String": " "}, "MergedWithPrevious")),
    **{f"metaspace, {scheme}": (None, metaspace(scheme)) for scheme in ("first", "always", "never")},
    **{f"metaspace, {scheme}, whole": (None, metaspace(scheme, split=False)) for scheme in ("first", "always", "never")},
    "metaspace of old": (None, {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "str_rep": "▁"}),
    "metaspace in a sequence": (None, sequence(metaspace("first"))),
}


def added(content: str, **options: bool) -> Definition:
    of_token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **of_token, **options}


ADDED: dict[str, list[Definition]] = {
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
MODELS: dict[str, Definition] = {
    "": {},
    "whole words": {"ignore_merges": True},
    "unknown": {"unk_token": "<unk>", "fuse_unk": True, "continuing_subword_prefix": "", "end_of_word_suffix": ""},
    "bytes": {"byte_fallback": True},
    "many ways": {"many ways": True},
    "any order": {"any order": True},
    "gaps": {"gaps": True},
    "other characters": {"other characters": True},
    "lacks bytes that no text has": {"lacks": [0xC0, 0xF5, 0xFF]},
}
MODELS_WITH_SPACES = ("", "unknown", "many ways", "any order", "gaps", "crossing", "characters for bytes")


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
    names = ("many ways", "any order", "gaps", "other characters", "lacks")
    ours = {name: options.pop(name, None) for name in names}
    merges = merges_of(letters, 400, seed, many_ways=bool(ours["many ways"]))
    rng = random.Random(seed)
    tokens = dict.fromkeys([*characters, *map("".join, merges)])
    if options.get("ignore_merges"):
        tokens |= dict.fromkeys("".join(rng.choices(letters, k=4)) for _ in range(100))
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


def loaded(definition: Definition) -> TokenizerJson:
    """The definition as a build loads it, with the library's tokenizer, to which the text of special tokens is text."""
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.encode_special_tokens = True
    return TokenizerJson("tokenizer.json", "digest", definition, tokenizer)


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
    letters = CHARACTER_LETTERS
    if name == "crossing":  # tokens with a space in their middle
        letters = [*letters, "a▁b", "s▁", ".▁"]
    model = model_of([*CHARACTERS, *dict.fromkeys(letters)], {"byte_fallback": True, **MODELS.get(name, {})}, letters, seed)
    vocabulary = model["vocab"]
    # A space is at the beginning of a token, as in published ones, unless tokens are to cross words.
    if name != "crossing":
        kept = [pair for pair in model["merges"] if "▁" not in "".join(pair).lstrip("▁")]
        gone = {"".join(pair) for pair in model["merges"]} - {"".join(pair) for pair in kept}
        model["vocab"] = vocabulary = {token: i for token, i in vocabulary.items() if token not in gone}
        model["merges"] = [pair for pair in kept if pair[0] in vocabulary and pair[1] in vocabulary]
    if name == "characters for bytes":
        for token in ("<0x09>", "<0x61>", "<0xC1>"):
            del vocabulary[token]
    return model


def byte_level_members() -> Iterator[Member]:
    pres, norms, models, tokens = (list(of.items()) for of in (BYTE_LEVEL, NORMALIZERS, MODELS, ADDED))
    # As many of each as have no common factor: so every pair of two is met.
    assert [len(of) for of in (pres, norms, models, tokens)] == [17, 4, 9, 13]
    for i in range(17 * 13):
        pre, norm, model, added_tokens = pres[i % 17], norms[i % 4], models[i % 9], tokens[i % 13]
        name = f"bytes {i}: {', '.join(filter(None, (pre[0], norm[0], model[0], added_tokens[0])))}"
        if i != 35:  # a space is added before text, and one of these begins with it
            yield Member(name, partial(_byte_level, name, norm[1], pre[1], model[1], added_tokens[1]), added_tokens[1])


def _byte_level(name: str, norm: Any, pre: Any, model: Definition, tokens: list[Definition], **others: Any) -> Definition:
    return definition_of(norm, pre, model_of(ALPHABET, model, BYTE_LETTERS, name), tokens, **others)


def members_with_spaces() -> Iterator[Member]:
    ways, models, tokens = list(WITH_SPACES.items()), MODELS_WITH_SPACES, list(ADDED.items())
    assert [len(of) for of in (ways, models, tokens)] == [11, 7, 13]
    for i in range(11 * 13):
        way, model, added_tokens = ways[i % 11], models[i % 7], tokens[i % 13]
        name = f"spaces {i}: {', '.join(filter(None, (way[0], model, added_tokens[0])))}"
        yield Member(name, partial(_with_spaces, name, *way[1], model, added_tokens[1]), added_tokens[1])


def _with_spaces(name: str, norm: Any, pre: Any, model: str, tokens: list[Definition]) -> Definition:
    return definition_of(norm, pre, model_with_spaces(model, name), tokens)


PIECE, START = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}


def template_processing(*single: Definition) -> Definition:
    """A post-processor that adds special tokens. *single*: what it makes of a text."""
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": [PIECE, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
    }


def other_members() -> Iterator[Member]:
    """What is beside the model, and what older files have."""
    plain = partial(_byte_level, "other", None, bytes_(regex=True), {}, ADDED["plain"])
    yield Member("template", partial(plain, post_processor=template_processing(START, PIECE)), ADDED["plain"])
    definition = plain()
    model = definition["model"]
    old = {"vocab": model["vocab"], "merges": [" ".join(pair) for pair in model["merges"]]}
    yield Member("merges of old", lambda: {**definition, "model": old, "added_tokens": []})
    shifted = [{**token, "id": token["id"] + 7} for token in definition["added_tokens"]]
    yield Member("other ids", lambda: {**definition, "added_tokens": shifted}, ADDED["plain"])


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
