"""Gates: how conditions are written, and which do not hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.config import BuildConfig
from tasks.faults import faults_of
from tasks.gates import LOST_SOURCES, Gate, Subject, judge, strictest_action, summary_of

ALL = Subject()
WEB, NOTES = Subject(source="web"), Subject(source="notes")


@pytest.mark.parametrize(
    ("of", "written", "kept"),
    [
        *(("tokens", *pair) for pair in [("-50 %", "-50 %"), ("- 50%", "-50 %"), ("+12.5 %", "+12.5 %"), (7, 7), (0, 0)]),
        ("skipped_share", "5 %", 0.05),
    ],
)
def test_a_limit_is_a_number_a_change_or_a_share(of, written, kept):
    assert Gate(of=of, at_least=written).at_least == kept


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        ({"of": "documnts", "at_least": 1}, "there is no fact 'documnts'. Did you mean 'documents'?"),
        ({"of": "documents"}, "has no limit"),
        ({"of": "documents", "at_least": "half"}, "should be a number"),
        ({"of": "documents", "at_least": "50 %"}, "write its sign, such as -50 %"),
        ({"of": "documents", "at_least": 5, "at_most": 4}, "at_least 5 is above at_most 4"),
        ({"of": "documents", "at_least": 5, "by": "source", "source": "web"}, "give one of them"),
        ({"of": "documents", "at_least": 5, "by": "source", "split": "train"}, "not by both"),
        ({"of": "documents", "at_least": 5, "reason": "empty"}, "documents is not known by reason"),
        ({"of": "near_duplicate_share", "at_most": 0.5, "by": "split"}, "near_duplicate_share is not known by split"),
        ({"of": "null_share", "at_most": 0.1}, "give its column"),
        ({"of": "added_share", "at_most": "+10 %"}, "without a sign"),
        ({"of": "skipped_share", "at_most": 0.1, "step": "length", "reason": "empty"}, "is named length.REASON"),
        ({"of": "documents", "source": "wbe", "at_least": 1}, "publish.gates.0: there is no source 'wbe'. Did you mean 'web'?"),
        ({"of": "distinct", "column": "ulr", "at_least": 1}, "there is no column 'ulr'. Did you mean 'url'?"),
        ({"of": "skipped_share", "step": "lenght", "at_most": 0}, "there is no step 'lenght'. Did you mean 'length'?"),
    ],
)
def test_a_gate_that_makes_no_sense_is_refused_with_the_nearest_name(gate, fault):
    settings = {
        "output": "/tmp/out",
        "tokenizer": "bytes",
        "source": {"name": "web", "path": "/tmp/in", "keep_columns": ["url"]},
        "documents": {"steps": [{"use": "length", "max_characters": 9}]},
        "publish": {"gates": [gate]},
    }
    with pytest.raises(ValidationError) as raised:
        BuildConfig.model_validate(settings)
    assert fault in "; ".join(faults_of(raised.value, BuildConfig, one_source=True))


def test_a_first_version_is_judged_by_what_is_absolute_alone():
    gates = [Gate(of="documents", at_least="-10 %"), Gate(of="removed_share", at_most=0), Gate(of="tokens", at_least=9)]
    now = {("documents", ALL): 1, ("tokens", ALL): 1}
    assert [one.of for one in judge(gates, now, None)] == ["tokens"]
    assert [one.of for one in judge(gates, now, {("documents", ALL): 9, ("tokens", ALL): 9})] == ["documents", "tokens"]


def test_a_source_that_is_lost_is_found_and_one_that_is_new_is_not():
    before = {("documents", WEB): 100}
    assert judge(LOST_SOURCES, {("documents", WEB): 50, ("documents", NOTES): 1}, before) == []
    (found,) = judge(LOST_SOURCES, {("documents", WEB): 49, ("documents", NOTES): 1}, before)
    assert found.sentence == "documents of source web: 49, -51.0 % from 100; wanted is at least -50 %"
    assert {one.place for one in judge(LOST_SOURCES, {("documents", WEB): 100, ("documents", NOTES): 0}, before)} == {
        "source notes"
    }


def test_what_could_not_be_told_does_not_pass():
    gate = Gate(of="changed_share", at_most=0.5)
    (found,) = judge([gate], {("changed_share", ALL): None}, {})
    assert "is unknown" in found.sentence


def test_the_strictest_action_wins():
    gates = [Gate(of="documents", at_least=9, action=action) for action in ("warn", "hold", "stop")]
    found = judge(gates, {("documents", ALL): 1}, None)
    assert [strictest_action(found[:count]) for count in range(4)] == [None, "warn", "hold", "stop"]
    assert summary_of(found, "hold") == "documents: 1; wanted is at least 9"


@given(before=st.integers(0, 2**50), now=st.integers(0, 2**50), percent=st.integers(-100, 300))
def test_changes_are_compared_exactly(before, now, percent):
    gate = Gate(of="tokens", at_least=f"{percent:+} %")
    is_found = bool(judge([gate], {("tokens", ALL): now}, {("tokens", ALL): before}))
    assert is_found == (100 * now < before * (100 + percent))
