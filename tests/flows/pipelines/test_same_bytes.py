"""Ten datasets of mixed features keep their bytes from release to release: version names and manifests as literals.

A manifest has the digest of every other object of its version. A literal changes only together with FORMAT_SEMANTICS, where the
change log says that datasets of one kind get other bytes, or where a library in the lock compresses to other bytes.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.arrays.layouts import LAYOUTS
from tests.faults.support import build_here, derive_here, export_here, import_here
from tests.flat_tokens.demo import TOKENIZER
from tests.made import small

WORDS = ["salt", "wind", "over", "the", "harbour", "wall", "été", "海", "and", "back"]
Pin = tuple[str, str]
"""A version's name, and the sha256 of its manifest."""


def text_of(number: int) -> str:
    """A text that its number alone decides; every ninth is empty."""
    return (
        "" if number % 9 == 8 else f"{number}: " + " ".join(WORDS[(number * k) % len(WORDS)] for k in range(1, 4 + number % 23))
    )


def row_of(number: int) -> dict[str, Any]:
    return {
        "id": f"d{number}",
        "text": text_of(number // 2 if number % 6 == 5 else number),
        "prompt": f"ask {number}?",
        "completion": text_of(number + 1),
        "language": ("en", "de", None)[number % 3],
        "score": number / 8,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One large JSONL file, three small ones, five text files."""
    home = tmp_path_factory.mktemp("sources")
    for name in ("large", "lines", "texts"):
        (home / name).mkdir()
    for name, first, stop in (("large/all", 0, 600), *((f"lines/part-{k}", 1000 + 70 * k, 1070 + 70 * k) for k in range(3))):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row_of(i)) + "\n" for i in range(first, stop)))
    for file in range(5):
        (home / f"texts/{file}.txt").write_text(text_of(2000 + file) * 20)
    return home


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several objects in each array."""
    for name in LAYOUTS:
        monkeypatch.setitem(LAYOUTS, name, small(name, 8192, 128))


def pin_of(path: str) -> Pin:
    return Path(path).name, hashlib.sha256(Path(path, "manifest.json").read_bytes()).hexdigest()


def built(home: Path, output: Path, *names: str, **settings: Any) -> Pin:
    """Build the sources of these names, with *settings*; a mapping of a source's name is of its settings."""
    sources = [{"name": name, "path": str(home / name), **settings.pop(name, {})} for name in names]
    common = {"name": "same", "tokenizer": "bytes", "validation_fraction": 0.25, "slice_bytes": 20_000}
    return pin_of(build_here({"output": str(output), "sources": sources, **common, **settings}).path)


def derived(output: Path, operation: str | dict[str, Any], *inputs: Path, **settings: Any) -> Pin:
    return pin_of(derive_here(operation, *inputs, output=output, **settings).path)


def mixed(home: Path, output: Path) -> Pin:
    return built(home, output, "large", "lines", "texts", large={"id_column": "id"})


def masked(home: Path, output: Path) -> Pin:
    pairs = {"prompt_column": "prompt", "completion_column": "completion"}
    return built(home, output, "large", "lines", large=pairs, layout="compact")


def kept(home: Path, output: Path) -> Pin:
    keep = {"id_column": "id", "keep_columns": ["language", "score"]}
    return built(home, output, "large", "texts", large=keep, validation_fraction=0)


def without_copies(home: Path, output: Path) -> Pin:
    return built(home, output, "large", documents={"duplicates": "drop", "empty": "skip"})


def stepped(home: Path, output: Path) -> Pin:
    steps = [{"use": "length", "min_bytes": 40}, {"use": "normalize"}]
    return built(home, output, "lines", tokenizer=TOKENIZER, documents={"steps": steps}, layout="zarr2")


def merged(home: Path, output: Path) -> Pin:
    built(home, output / "one", "large", "lines", tokenizer=TOKENIZER, lines={"id_column": "id"})
    built(home, output / "other", "texts", "lines", tokenizer=TOKENIZER)
    return derived(output / "merged", "merge", output / "one", output / "other", layout="compact")


def filtered(home: Path, output: Path) -> Pin:
    kept(home, output / "kept")
    subset = {"operation": "subset", "where": "language = 'de' or tokens >= 90", "fraction": 0.7, "seed": 3}
    return derived(output / "subset", subset, output / "kept")


def shuffled(home: Path, output: Path) -> Pin:
    masked(home, output / "masked")
    return derived(output / "shuffled", {"operation": "shuffle", "seed": 5}, output / "masked")


def relaid(home: Path, output: Path) -> Pin:
    without_copies(home, output / "built")
    return derived(output / "relaid", "relayout", output / "built", layout="zarr2")


def imported(home: Path, output: Path) -> Pin:
    mixed(home, output / "built")
    export_here(output / "built", output / "files")
    return pin_of(import_here(output / "files", output / "back").path)


PINS: dict[Callable[[Path, Path], Pin], Pin] = {
    mixed: ("d78811f261fe885c", "acaa3459f164ff2346bff15ac4c732c70d68f3612853446e706530c3479f86d9"),
    masked: ("d83420fa15738a0a", "4a96fc802740a91afda05481fd68743483fec2c25680d2c3d03a0c757c56eff9"),
    kept: ("2c6f420c7d3b553f", "e00699a79d3023829cf01f7f9080508fa03ddab2f946cc88973c10aabf645c23"),
    without_copies: ("e08666821de7deb0", "d2a8364f16945087683fa76c0211592aaf06df8b5a5df6fa2986ac2956b76222"),
    stepped: ("ddf150b0fb09ea0b", "2411ab4ddfdc918ff9a5ac3f32e9fa447120c57bb78b8377e9b134940d91ccc2"),
    merged: ("c2fccec29d776643", "7821e55abe11c90cbfc19746dbf7e8f4652732660b30ffb4204b0eb6f754163f"),
    filtered: ("916ebdbfc034c24a", "ff126ff58c297863076d326d53aabb1d3476e4dde67b097f7aa438dc4ca2efb8"),
    shuffled: ("060a4e0f7d684061", "323c72ae87ab1c371e3d54b92992d691cf466c79f405f6fe979fc342e3853854"),
    relaid: ("21ea355414603973", "92bdd113689cb3295b471558f7807ce5162cdf7b8929fbf4ff3b8207375af7ee"),
    imported: ("2ee2fb9d3193a499", "b7b5a0bf708545f51c7396935e8d73aedfdf90fe8be840a0d651f65a20528e15"),
}


@pytest.mark.parametrize("make", PINS, ids=lambda make: make.__name__)
def test_a_dataset_has_the_bytes_that_it_always_had(home, tmp_path, make):
    """Whatever changed in how it is made."""
    assert make(home, tmp_path) == PINS[make]
