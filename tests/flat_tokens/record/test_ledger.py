"""A run's ledger: every batch, past and future, follows from one small file."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import Ledger, Mixture, Schedule
from flat_tokens.rows.loader import Steps
from tests.damage import change_file
from tests.flat_tokens.rows.rows_by_number import VIEWS, Numbers
from tests.made import write_sequences
from tests.refusal import refusal


@pytest.fixture
def views(tmp_path: Path) -> dict[str, Any]:
    """Packed rows of three small datasets."""
    for k, name in enumerate(("web", "code", "books")):
        write_sequences(tmp_path / name, [[100 * k + i] * (i % 9) for i in range(90)])
    return {name: flat_tokens.open(tmp_path / name).train.packed(8) for name in ("web", "code", "books")}


def batches(mixture: Mixture, stop: int) -> list[list[Any]]:
    return [[field.tolist() for field in (*batch.samples, batch.source, batch.index)] for batch in mixture.steps(0, stop)]


def test_a_ledger_reads_as_the_run_was_written(tmp_path, views):
    path = tmp_path / "run.json"
    ledger = Ledger.create(path, {"web": (views["web"], 2), "code": (views["code"], 1.5)}, 16, seed=3)
    plain = Mixture({"web": (views["web"], 2), "code": (views["code"], 1.5)}, 16, 3)
    assert batches(ledger.mixture(), 9) == batches(plain, 9)

    ledger.edit(5, {"web": Schedule([(5, 1), (50, 3)]), "books": (views["books"], 1, 4)}, batch_size=32)
    ledger.edit(8, {"code": 0.1, "books": 2})
    ledger.edit(9, batch_size=24)
    assert ledger.names == ("web", "code", "books")
    expected = batches(ledger.mixture(), 30)
    assert expected[:5] == batches(plain, 5)
    assert [len(batch[-1]) for batch in expected[:11]] == [16] * 5 + [32] * 3 + [32] + [24] * 2
    assert path.stat().st_size < 3000

    again = Ledger.open(path)
    assert batches(again.mixture(), 30) == expected
    assert json.loads(path.read_bytes())["edits"][1]["weights"]["web"] == {
        "points": [[5, 1], [50, 3]],
        "by": "step",
        "kind": "linear",
    }


def test_a_state_goes_on_across_edits_that_come_after_it(tmp_path, views):
    ledger = Ledger.create(tmp_path / "run.json", {"web": (views["web"], 1), "code": (views["code"], 1)}, 8)
    steps = ledger.mixture().steps()
    for _ in itertools.islice(steps, 6):
        pass
    state = steps.state_dict()
    ledger.edit(6, {"code": 1}, batch_size=12)
    again = Steps(Ledger.open(tmp_path / "run.json").mixture())
    again.load_state_dict(state)
    batch = next(again)
    assert set(batch.source.tolist()) == {1}
    assert len(batch.source) == 12
    ledger.edit(7, batch_size=20)
    with refusal("in this loader that step is at sample"):
        ledger.mixture().steps().load_state_dict({"step": 9, "position": 6 * 8 + 3 * 12})


def test_every_view_is_opened_again_as_it_was(tmp_path, views):
    web, code = views["web"].tokens, views["code"].tokens
    for number, (rows, settings) in enumerate(
        [
            *VIEWS,
            ("packed", {"fields": ["inputs", "targets"]}),
            ("documents", {"pad_id": 7, "bos": 1}),
            ("blocks", {"loss_mask": True, "eos": 3}),
            ("packed_documents", {"too_long": "cut", "pad_to": 4, "padding_idx": 3}),
        ]
    ):
        path = tmp_path / f"{number}.json"
        made = {name: (getattr(tokens, rows)(8, **settings), 1) for name, tokens in (("web", web), ("code", code))}
        expected = Ledger.create(path, made, 8).mixture()
        found = Ledger.open(path).mixture()
        assert [found.digest(step) for step in range(4)] == [expected.digest(step) for step in range(4)]


def test_views_of_no_dataset_are_given_again(tmp_path):
    path = tmp_path / "run.json"
    expected = Ledger.create(path, {"a": (Numbers(50), np.float32(1)), "b": (Numbers(30), np.int64(1), 2)}, 8).mixture()  # type: ignore[dict-item]
    found = Ledger.open(path, views={"a": Numbers(50), "b": Numbers(30)}).mixture()
    assert all(np.array_equal(found[step].index, expected[step].index) for step in range(9))
    with refusal(r"source 'a' is a view of no dataset. Open the ledger with views="):
        Ledger.open(path).mixture()
    with refusal("source 'b' is not what the run has: its rows is 31, but in the ledger it is 30"):
        Ledger.open(path, views={"a": Numbers(50), "b": Numbers(31)}).mixture()
    with refusal("there is no source 'c'; there are 'a', 'b'"):
        Ledger.open(path, views={"c": Numbers(50)})


def test_a_dataset_may_move_but_not_change(tmp_path, views):
    path = tmp_path / "run.json"
    expected = Ledger.create(path, {"web": (views["web"], 1), "code": (views["code"], 1)}, 8).mixture().digest(3)
    os.rename(tmp_path / "web", tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        Ledger.open(path).mixture()
    assert Ledger.open(path, places={"web": str(tmp_path / "moved")}).mixture().digest(3) == expected
    write_sequences(tmp_path / "web", [[i + 5] * (i % 9) for i in range(90)])
    with refusal(r"source 'web' is not what the run has: its dataset is .* add it as a new source"):
        Ledger.open(path).mixture()


def test_a_url_in_a_ledger_is_followed_only_when_the_ledger_is_trusted(tmp_path, views):
    path = tmp_path / "run.json"
    expected = Ledger.create(path, {"web": (views["web"], 1)}, 8).mixture().digest(3)
    url = f"file://{tmp_path}/web"
    path.write_text(path.read_text().replace(f'"{tmp_path}/web"', f'"{url}"'))
    with refusal(r"says that source 'web' is at file://.*trust_records"):
        Ledger.open(path).mixture()
    assert Ledger.open(path, trust_records=True).mixture().digest(3) == expected


def test_edits_that_cannot_be_are_refused_and_change_nothing(tmp_path, views):
    path = tmp_path / "run.json"
    ledger = Ledger.create(path, {"web": (views["web"], 1), "code": (views["code"], 1, 2)}, 8)
    ledger.edit(5, {"code": 1})
    before = path.read_bytes()
    for step, sources, batch_size, complaint in (
        (4, {"web": 1}, None, "would change the past: there is one from step 5"),
        (6, {"books": 1}, None, "there is no source 'books'"),
        (6, {"web": (views["web"], 1)}, None, "the run has had a source 'web'. Give its weight alone, or the new source another"),
        (6, {}, None, "at least one source"),
        (6, {"web": 0}, None, "weights are positive"),
        (6, {"web": 1}, 0, "batch_size is 0"),
        (99, {"web": 1}, None, "an edit from step 99 on, but the run ends before step"),
        (6, {"books": (views["books"].tokens.packed(9), 1)}, None, "do not fit into one batch"),
    ):
        with refusal(complaint):
            ledger.edit(step, sources, batch_size=batch_size)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert ledger.names == ("web", "code")
    with refusal("there is a ledger already", FileExistsError):
        Ledger.create(path, {"web": (views["web"], 1)}, 8)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "other"},
        {"seed": -1},
        {"edits": []},
        {"edits": {0: {"step": "0"}}},
        {"edits": {0: {"batch_size": 0}}},
        {"edits": {0: {"weights": {"web": "1"}}}},
        {"edits": {0: {"weights": {"web": {"points": []}}}}},
        {"edits": {0: {"weights": {"other": 1}}}},
        lambda content: content["sources"].append(content["sources"][0]),
        {"sources": {0: {"rows": None}}},
        *({"order": order} for order in (3, 1, None, True, "2")),
        *({"format_version": version} for version in (1, 3)),
    ],
)
def test_what_is_no_ledger_is_refused_with_its_path(tmp_path, views, damage):
    path = tmp_path / "run.json"
    Ledger.create(path, {"web": (views["web"], 1)}, 8)
    change_file(path, damage)
    with refusal(r"run\.json: is not a ledger that is understood here"):
        Ledger.open(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("packed_documents", "require_vocab", "the rows of source 'web' are 'require_vocab', but they are one of packed"),
        ("HERE/web", "/" + "x" * 5000, r"run\.json: source 'web': File name too long"),
        ('"fit": ', '"cache": "HERE/cache", "fit": ', "'packed_documents' has no setting 'cache'"),
    ],
    ids=["rows that no split has", "no path", "where something is written"],
)
def test_what_a_ledger_cannot_say_is_refused(tmp_path, views, old, new, words):
    path = tmp_path / "run.json"
    Ledger.create(path, {"web": (views["web"].tokens.packed_documents(20), 1)}, 8)
    path.write_text(path.read_text().replace(*(text.replace("HERE", str(tmp_path)) for text in (old, new))))
    with refusal(words, (ValueError, OSError)):
        Ledger.open(path).mixture()
    assert not (tmp_path / "cache").exists()


def test_a_state_of_another_order_is_refused():
    """One that was written by hand has no order."""
    mixture = Mixture({"web": (Numbers(50), 1)}, 8)
    state = mixture.steps(3).state_dict()
    assert state == {"step": 3, "position": 24, "order": 2}
    steps = mixture.steps()
    with refusal(r"the state is of order 1, but this loader has order 2$"):
        steps.load_state_dict({**state, "order": 1})
    steps.load_state_dict({"step": 3, "position": 24})
    assert next(steps).index.tolist() == mixture[3].index.tolist()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ((Numbers(5), "1"), "source 'b' has weight '1', but a weight is a number or a Schedule"),
        ((Numbers(5), True), "source 'b' has weight True"),
        (Numbers(5), "source 'b' "),
        ((Numbers(5),), r"source 'b' is \(.*, but a source is \(view, weight\) or \(view, weight, epochs\)"),
        ((Numbers(5), 1, 2, 3), "source 'b' is "),
        (([1, 2], 1), r"source 'b' is \[1, 2\], but a view has len\(view\) and view.batch\(indices\)"),
        ((Numbers(5), 1, "2"), "epochs of source 'b' is '2', but it is a whole number"),
    ],
)
def test_what_is_no_source_is_refused_by_name(tmp_path, source, complaint):
    """By mixtures and ledgers, which keep nothing of it."""
    sources = {"a": (Numbers(5), 1), "b": source}
    with refusal(complaint, TypeError):
        Mixture(sources, 4)
    with refusal(complaint, TypeError):
        Ledger.create(tmp_path / "run.json", sources, 4)
    assert not (tmp_path / "run.json").exists()
