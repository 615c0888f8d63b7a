"""Vocabularies of one's own: which text they are trained on, and what is on the disk after each step."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.arrays.opening import open_array
from flows.pipelines.train_tokenizer import VocabularyResult, cut_trained, train_on_run, train_on_sources, train_on_version
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.derive.choice import sample_hashes
from tasks.vocabularies import training
from tasks.vocabularies.request import VocabularyRequest
from tasks.vocabularies.training import definition_of, learn
from tests.calls import before_each_call
from tests.faults.support import build_here, digests, retokenize_here, write_notes
from tests.made import foreign
from tests.refusal import refusal
from tests.sources import write_rows

WORDS = ["salt", "wind", "over", "the", "harbour", "wall", "and", "back", "under", "moon", "été", "海", "<|endoftext|>"]


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are decoded some at a time."""
    monkeypatch.setattr("tasks.vocabularies.training.DOCUMENTS_AT_A_TIME", 16)
    monkeypatch.setattr("tasks.vocabularies.training.BATCH_TOKENS", 200)


def text_of(number: int) -> str:
    return " ".join(WORDS[(number * k) % len(WORDS)] for k in range(1, 4 + number % 23)) + f" {number}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two JSONL files. Nothing changes them."""
    home = tmp_path_factory.mktemp("train-tokenizer")
    for file in range(2):
        rows = [{"id": f"d{i}", "text": text_of(i)} for i in range(150 * file, 150 * file + 150)]
        write_rows(home / f"notes/{file}.jsonl", rows)
    return home


@pytest.fixture(scope="module")
def published(home: Path) -> Path:
    """A version of the notes, by bytes. Nothing changes it."""
    return Path(build_here(settings_of(home, home / "out")).path)


def settings_of(home: Path, output: Path, **changes: Any) -> dict[str, Any]:
    source = {"path": str(home / "notes"), "id_column": "id"}
    common = {"name": "notes", "tokenizer": "bytes", "validation_fraction": 0.25}
    return {**common, "output": str(output), "source": source, **changes}


def request_of(*sizes: int, **changes: Any) -> VocabularyRequest:
    return VocabularyRequest(vocab_sizes=sizes, **changes)


def trained(settings: dict[str, Any], request: VocabularyRequest, to: Path, workers: int = 2) -> VocabularyResult:
    with Threads(workers) as runner:
        return train_on_sources(BuildConfig.model_validate(settings), request, f"{to}/{{name}}-{{size}}", runner)


def on_version(path: Path, request: VocabularyRequest, to: Path, **changes: Any) -> VocabularyResult:
    told = {"tokenizer": None, "trusted": False, "warn": lambda message: None, **changes}
    return train_on_version(str(path), request, f"{to}/{{name}}-{{size}}", **told)


def texts(path: Path, split: str = "train", seed: int | None = None, fraction: float = 1.0) -> list[str]:
    """The texts of a split of a version by bytes, or of a sample of it."""
    dataset = flat_tokens.open(path)
    tokens = getattr(dataset, split)
    key = open_array(dataset.store / f"documents/{split}/key", "uint64").read(0, tokens.seq_count)
    taken = sample_hashes(key.copy(), seed or 0) < int(fraction * 2**64) if fraction < 1 else [True] * len(key)
    return [bytes((tokens.sequence(i) - 1).tolist()).decode() for i in range(tokens.seq_count) if taken[i]]


def expected(some: list[str], request: VocabularyRequest, size: int | None = None) -> bytes:
    """The tokenizer.json of a training on these texts."""
    merges = learn(some, request)
    return definition_of(merges.first((size or request.vocab_sizes[-1]) - 1), request.regex, request.special_tokens)


def test_a_ladder_has_what_a_training_of_each_size_has(home, tmp_path):
    """The text is read once for all of them; and they are cut from a trained one without any text."""
    settings = settings_of(home, tmp_path / "out")
    trained(settings, request_of(280, 300, 340), tmp_path / "ladder")
    for size in (280, 300, 340):
        trained(settings, request_of(size), tmp_path / "alone")
    cut_trained(str(tmp_path / "ladder/notes-340"), (280, 300, 340), f"{tmp_path}/cut/{{name}}-{{size}}")
    assert digests(tmp_path / "ladder") == digests(tmp_path / "alone") == digests(tmp_path / "cut")
    assert len(digests(tmp_path / "ladder")) == 6


def test_the_bytes_are_the_same_for_any_workers_and_any_order_of_files(home, tmp_path, monkeypatch):
    request = request_of(330, fraction=0.5, seed=3)
    renamed = tmp_path / "renamed"
    (renamed / "notes").mkdir(parents=True)
    for name, other in (("0.jsonl", "b.jsonl"), ("1.jsonl", "a.jsonl")):
        shutil.copy(home / "notes" / name, renamed / "notes" / other)
    tokenizers = set()
    for number, (place, workers, parallel) in enumerate([(home, 1, "false"), (home, 4, "true"), (renamed, 2, "true")]):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        to = tmp_path / f"to-{number}"
        trained(settings_of(place, tmp_path / f"out-{number}", slice_bytes=4096 + 9000 * number), request, to, workers)
        tokenizers.add((to / "notes-330/tokenizer.json").read_bytes())
    assert len(tokenizers) == 1


def test_a_sample_is_that_of_a_subset(published, home, tmp_path):
    request = request_of(290, fraction=0.5, seed=7)
    sample = texts(published, seed=7, fraction=0.5)
    assert 20 < len(sample) < len(texts(published)) - 20
    trained(settings_of(home, tmp_path / "out"), request, tmp_path / "sources")
    on_version(published, request, tmp_path / "version")
    wanted = expected(sample, request)
    for place in ("sources", "version"):
        assert (tmp_path / place / "notes-290/tokenizer.json").read_bytes() == wanted
    record = json.loads((tmp_path / "version/notes-290/training.json").read_bytes())
    assert record["read"] == {"documents": len(sample), "text_bytes": sum(len(text.encode()) for text in sample)}
    assert record["trained_on"]["dataset"]["version"] == published.name


def test_a_trained_vocabulary_is_used_and_its_versions_are_decoded_without_special_tokens(home, published, tmp_path):
    """Trained on a version of a trained tokenizer: text that looks like a special token stays text."""
    request = request_of(310)
    trained(settings_of(home, tmp_path / "out"), request, tmp_path / "first")
    tokenizer = str(tmp_path / "first/notes-310")
    (result,) = retokenize_here(settings_of(home, home / "out"), tokenizer, output=f"{tmp_path}/{{tokenizer}}")
    version, dataset = Path(result.path), flat_tokens.open(result.path)
    assert dataset.manifest["provenance"]["tokenizer"]["highest_id"] == 309
    assert dataset.token_bytes[309] == 0
    ids = dataset.train.slice(0, dataset.train.token_count) >> 1
    assert int(dataset.token_bytes[ids].sum()) == flat_tokens.open(published).train.token_count
    from_a_file = build_here(settings_of(home, tmp_path / "again", tokenizer=f"{tokenizer}/tokenizer.json")).path
    with refusal("--trust-records"):
        on_version(Path(from_a_file), request, tmp_path / "second")
    on_version(version, request, tmp_path / "second", tokenizer=tokenizer)
    first, second = ((tmp_path / place / "notes-310/tokenizer.json").read_bytes() for place in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("length", [24, 300])
def test_a_run_has_seen_each_document_as_often_as_epochs_have(published, tmp_path, length):
    """Also one that a selection has twice."""
    train, every = flat_tokens.open(published).train, texts(published)
    chosen = train.select(indices=[5, 3, 9, 3, *range(40, 90)])
    views = {"all": train.packed(length), "some": chosen.packed(length)}
    ledger = Ledger.create(tmp_path / "run.json", {name: (view, 1) for name, view in views.items()}, 4, seed=1)
    mixture, step, wanted = ledger.mixture(), 30, []
    for name, documents in {"all": every, "some": [every[int(i)] for i in chosen.numbers]}.items():
        seen = mixture.seen(range(len(documents)), before=step, source=name)
        wanted += [documents[i] for i, _ in sorted({*zip(seen.asked.tolist(), seen.epoch.tolist(), strict=True)})]
    opened = Ledger.open(tmp_path / "run.json", views=views)
    request = request_of(320)
    result = train_on_run(opened, step, request, f"{tmp_path}/to/{{size}}", None, False, lambda message: None)
    assert result.documents == len(wanted)
    assert (tmp_path / "to/320/tokenizer.json").read_bytes() == expected(wanted, request)


def test_what_was_trained_before_is_not_trained_again(home, tmp_path, monkeypatch):
    settings, request = settings_of(home, tmp_path / "out"), request_of(280, 300)
    first = trained(settings, request, tmp_path / "to")
    monkeypatch.setattr("flows.pipelines.train_tokenizer.learn", None)
    again = trained(settings, request, tmp_path / "to")
    assert (first.was_done, again.was_done) == (False, True)
    assert again.vocabularies == first.vocabularies
    for other in (request_of(280, pattern="gpt2"), request_of(280, fraction=0.5), request_of(280, special_tokens=("<s>",))):
        with refusal(r"tokenizer\.json: was trained on other text, or with other settings\. .*--to"):
            trained(settings, other, tmp_path / "to")


def test_after_a_kill_no_vocabulary_is_half(published, tmp_path, monkeypatch):
    """Whatever was written is used; the same command writes the rest, and the bytes are those of a training without a kill. What
    is half written is removed, another file is not.
    """
    request = request_of(280, 300)
    on_version(published, request, tmp_path / "whole")
    (tmp_path / "whole/notes-280/.mine.part").write_bytes(b"")
    for writes in range(4):
        to, left = tmp_path / f"killed-{writes}", iter(range(writes))

        def die_at_last(*_: object, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            before_each_call(patch, "flat_tokens.stores.store.Store.put", die_at_last)
            with pytest.raises(KeyboardInterrupt):
                on_version(published, request, to)
        for found in to.rglob("tokenizer.json"):
            training.read(str(found.parent))
        for left_half in (".tokenizer.json.0123abcd.part", ".mine.part"):
            (to / "notes-280").mkdir(exist_ok=True, parents=True)
            (to / "notes-280" / left_half).write_bytes(b"")
        on_version(published, request, to)
        assert digests(to) == digests(tmp_path / "whole")


def test_roots_bind_where_vocabularies_are_written(published, tmp_path, monkeypatch):
    monkeypatch.setenv("FLAT_TOKENS_OUTPUT_ROOTS", str(tmp_path / "allowed"))
    on_version(published, request_of(280), tmp_path / "allowed")
    with refusal("FLAT_TOKENS_OUTPUT_ROOTS"):
        on_version(published, request_of(280), tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_what_cannot_be_trained_or_cut_is_refused(home, published, tmp_path):
    with refusal(r"pattern '\(':"):
        on_version(published, request_of(300, pattern="("), tmp_path / "to")
    with refusal(r"is one directory for 2 vocabularies\. Put \{size\} in it"):
        train_on_version(str(published), request_of(280, 300), str(tmp_path / "one"), None, False, print)
    prompts = {"path": str(home / "notes"), "prompt_column": "id", "completion_column": "text"}
    with refusal(r"has prompts with completions.*train-tokenizer OUTPUT"):
        trained(settings_of(home, tmp_path / "out", source=prompts), request_of(300), tmp_path / "to")
    with refusal(r"is not a dataset with a manifest.*Import it first"):
        on_version(foreign(tmp_path / "plain", [[1, 2]]), request_of(300), tmp_path / "to")
    with refusal(r"have [\d,]+ merges, enough for [\d,]+ ids, not for 60,000\. .*--vocab-size to"):
        trained(settings_of(home, tmp_path / "out"), request_of(60_000), tmp_path / "to")
    assert not (tmp_path / "to").exists()
    on_version(published, request_of(300), tmp_path / "to")
    with refusal("has 300 ids, of which 400 cannot be cut"):
        cut_trained(str(tmp_path / "to/notes-300"), (400,), str(tmp_path / "cut"))
    with refusal("is not a vocabulary of train-tokenizer"):
        cut_trained(str(home), (300,), str(tmp_path / "cut"))
    tokenizer = tmp_path / "to/notes-300/tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    with refusal(r"training\.json: does not describe the vocabulary next to it"):
        cut_trained(str(tokenizer), (280,), str(tmp_path / "cut"))


def test_the_command_trains_cuts_and_says_what_it_wrote(tmp_path, terminal):
    write_notes(tmp_path / "notes.jsonl", 40)
    config = tmp_path / "dataset.yaml"
    config.write_text(json.dumps(settings_of(tmp_path, tmp_path / "out", source={"path": str(tmp_path / "notes.jsonl")})))
    to = f"{tmp_path}/vocabularies/{{name}}-{{size}}"
    common = ["--to", to, "--no-server", "--quiet"]
    told = terminal.out("train-tokenizer", config, "--vocab-size", "270,280", *common)
    assert told.startswith("2 vocabularies, 270 and 280 ids, of ")
    assert "vocabularies/notes-270  270 ids, " in told
    trained_one = str(tmp_path / "vocabularies/notes-280")
    errors = terminal.errors("train-tokenizer", "--from", trained_one, "--pattern", "gpt2", "--vocab-size", "260", *common)
    assert "--from reads no text: pattern" in errors
    (cut,) = terminal.json("train-tokenizer", "--from", trained_one, "--vocab-size", "260", *common)["vocabularies"]
    assert (cut["vocab_size"], cut["merges"]) == (260, 3)
