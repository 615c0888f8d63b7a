"""flat-tokens stats: every number against counting by hand."""

import itertools
import json
import math
import re
import shutil
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens
import flat_tokens.tools.stats
from flat_tokens.tools.corpus import Corpus, open_corpus
from flat_tokens.tools.stats import ValueCounts, count, histogram, summarise
from flat_tokens.vocabulary import Vocabulary
from tests.made import in_memory, write_sequences

VOCABULARY = Vocabulary.of("few", None, {0: b"a", 1: b"bc", 3: "é".encode(), 4: b"x"}, None)


def summary_of(corpus: Corpus, vocabulary: Vocabulary | None = None, top: int = 25) -> dict[str, Any]:
    found = summarise(corpus, {name: count(corpus, name) for name in corpus.splits}, vocabulary, top)
    return json.loads(json.dumps(found))  # it is for JSON


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=10), *[st.integers(1, n) for n in (9, 12, 20)])
@example([[2**31 - 1], [], [0, 2**31 - 1]], 1, 12, 20)
def test_ids_and_lengths_are_counted_whatever_they_are(sequences, window, dense, distinct):
    """Values above the dense ones are told apart up to a number of different ones; the rest is counted together."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("COUNT_TOKENS", window), ("DENSE_VALUES", dense), ("DISTINCT_VALUES", distinct)):
            patch.setattr(flat_tokens.tools.stats, name, value)
        counted = count(open_corpus(in_memory(sequences)), "train")
    for found, values in ((counted.ids, itertools.chain(*sequences)), (counted.lengths, map(len, sequences))):
        expected, told = Counter(values), dict(zip(found.values.tolist(), found.counts.tolist(), strict=True))
        assert sum(told.values()) + found.untold == expected.total()
        assert [*told] == sorted(told)
        assert sum(value >= dense for value in expected) > distinct or (told, found.untold) == (expected, 0)
        assert sum(value >= dense for value in told) <= distinct
        assert all(expected[value] >= times for value, times in told.items())


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 100))
def test_percentiles_and_the_histogram_are_those_of_all_values(values, percent):
    """Bins follow each other from 0 on, and every doubling is an edge."""
    tally = ValueCounts()
    tally.add(np.array(values))
    bins = histogram(tally.counts())
    edges = [0, *(found["to"] + 1 for found in bins)]
    assert [found["from"] for found in bins] == edges[:-1]
    assert {1 << k for k in range(max(values).bit_length())} <= set(edges)
    for found in bins:
        inside = [value for value in values if found["from"] <= value <= found["to"]]
        assert (found["seq_count"], found["token_count"]) == (len(inside), sum(inside))
    assert tally.counts().percentile(percent) == sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def test_a_small_dataset_by_hand():
    """Ids 0, 1, 3 and 4 are tokens of 1, 2, 2 and 1 bytes; 2 and 5 are none."""
    found = summary_of(open_corpus(in_memory([[0, 0, 1], [], [3, 0, 5, 5]], [[1]])), VOCABULARY)
    train, total = found["splits"]["train"], found["total"]
    assert (
        train.items()
        >= {"token_count": 7, "seq_count": 3, "empty_seq_count": 1, "decoded_bytes": 3 + 2 + 2, "bytes_per_token": 1}.items()
    )
    assert train["lengths"].items() >= {"min": 0, "p25": 0, "p50": 3, "p99": 4, "max": 4, "token_median": 4}.items()
    assert [(one["id"], one["text"], one["count"]) for one in total["top_tokens"]] == [
        (0, "'a'", 3),
        (1, "'bc'", 2),
        (5, repr("\ufffd"), 2),
        (3, "'é'", 1),
    ]
    assert total["top_tokens"][0]["share"] == 3 / 8
    use = total["vocabulary_use"]
    assert (use["size"], use["used"], use["unused"], use["outside"]) == (4, 3, 1, 1)
    assert use["unused_examples"] == [{"id": 4, "text": "'x'"}]
    assert (total["distinct_ids"], total["max_token_id"]) == (4, 5)
    assert total["rank_frequency"] == [[1, 3], [2, 2], [3, 2], [4, 1]]
    assert sum(one["used"] for one in use["by_id"]) == 3
    nothing = summary_of(open_corpus(in_memory([], [[]])), VOCABULARY)
    assert nothing["splits"]["train"]["lengths"]["p50"] is nothing["total"]["bytes_per_token"] is None


def test_the_terminal_shows_all_numbers(demo, trusting):
    """Decoding every token gives the bytes that the build read, in both splits together."""
    said = trusting.out("stats", demo, "--top", "3")
    for shown in (
        r"^  train +44,912 +263 +0 +171 +18 +27 +68 +108 +140 +229 +316 +411 +792$",
        r"^ +64 to 127 +93 +35\.4 % +21\.2 % ",
        r"^  stories +1 +189 +41,024 +3\.213 +73\.5 % ",
        " 3.135, from 175,022 bytes of text",
        " 3.141, from 141,052 bytes",
        " 3.114, from 33,970 bytes",
        " 154 of 4,096 ids",
    ):
        assert re.search(shown, said, re.M), shown
    assert re.fullmatch(r"( +\d+  '.*\n){3}", said.rpartition("most frequent tokens\n")[2])


def test_one_split_without_its_tokenizer_has_statistics_of_ids(tmp_path, version, trusting):
    shutil.copytree(version, tmp_path / "copy")
    status, out, errors = trusting("stats", tmp_path / "copy", "--split", "validation", "--json")
    found = json.loads(out)
    assert (status, *found["splits"], found["total"]["token_count"]) == (0, "validation", 10_908)
    assert found["text_bytes"] is found["total"]["top_tokens"][0]["text"] is None  # bytes are recorded of both splits
    assert found["total"]["vocabulary_use"]["size"] == 4096
    assert re.search(r"tokens are shown by their ids: .*tokenizer\.json.*--tokenizer", errors)


def test_a_manifest_that_boasts_of_its_vocabulary_costs_no_memory(tmp_path, tool):
    tokenizer = {"name": "none", "digest": "0", "highest_id": 2**60}
    write_sequences(tmp_path / "data", [[1, 2]], provenance={"tokenizer": tokenizer})
    assert tool.json("stats", tmp_path / "data")["total"]["vocabulary_use"] is None
