"""flat-tokens inspect: what is there, a sequence as text, and what holds a text, against searching by hand."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens
import flat_tokens.tools.inspect
from flat_tokens.tools import terminal
from flat_tokens.tools.corpus import open_corpus, windows
from flat_tokens.tools.inspect import find_ids, find_text
from flat_tokens.vocabulary import Vocabulary, load_vocabulary
from tests.flat_tokens.demo import DEMO, build_lines, shard_in
from tests.made import in_memory, write_sequences

PIECES = {0: b"a", 1: b"b", 2: b"ab", 3: b"ba", 4: "é".encode(), 5: b"\xc3", 6: b"\xa9"}
VOCABULARY = Vocabulary.of("few", None, PIECES, None)
RAGGED = st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=8)


def split_of(sequences: list[list[int]]) -> Any:
    return open_corpus(in_memory(sequences)).splits["train"]


@pytest.mark.parametrize("pieces", [PIECES, {i: i.to_bytes(4, "little") for i in PIECES}])
@given(RAGGED, st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 9))
@example([[0, 1], [2, 0, 1, 0]], [1, 0], 1)
@example([[1], [2, 3]], [1, 2], 2)
@example([[1, 0]], [0], 9)
def test_text_and_ids_are_found_in_the_sequences_that_hold_them(pieces, sequences, needle, window):
    """However tokens and windows cut it, never over the end of a sequence, and at the token where it first begins."""
    wanted, width, expected = b"".join(pieces[i] for i in needle), 1 if pieces is PIECES else 4, []
    for i, sequence in enumerate(sequences):
        text, ends = b"".join(pieces[token] for token in sequence), np.cumsum([len(pieces[token]) for token in sequence])
        places = [at for at in range(0, len(text), width) if text.startswith(wanted, at)]
        expected += [(i, int(np.searchsorted(ends, at, side="right"))) for at in places[:1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens.tools.inspect, "windows", partial(windows, max_tokens=window))
        split = split_of(sequences)
        matches = find_text(split, VOCABULARY, wanted) if width == 1 else find_ids(split, np.array(needle, np.uint32), None)
        found = list(matches)
    assert [(match.sequence, match.token) for match in found] == expected
    assert width == 1 or all(match.found == " ".join(map(str, needle)) for match in found)


def test_matched_ids_are_shown_as_text_within_their_sequence():
    split = split_of([[0, 0], [1, 2, 1, 0], [0]])
    assert [*find_ids(split, np.array([2], np.uint32), VOCABULARY)] == [(1, 1, "b", "ab", "ba")]


def test_it_says_what_is_there(demo, tmp_path, trusting):
    said = trusting.out("inspect", demo)
    for part in ("flat-tokens dataset 'dataset', version ", "44,912", "263", "mmap, zarr v3", "tokenizer.json", "330 documents"):
        assert part in said
    assert re.search(r"source notes from local files \(notes\.jsonl\): 1 file, 50\.4 kB", said)
    assert "\x1b" not in said
    build_lines(tmp_path, "a")
    assert "no document is drawn" in trusting.out("inspect", tmp_path / "out")


def test_json_has_all_that_is_known(demo, trusting):
    said, dataset = trusting.json("inspect", demo), flat_tokens.open(demo)
    assert said["tokenizer"]["digest"] == dataset.manifest["provenance"]["tokenizer"]["digest"]
    stored = sum(path.stat().st_size for path in Path(dataset.path).rglob("*") if path.is_file())
    assert 0 < stored - said["byte_count"] < 50_000  # the manifest and the root's metadata are not in the manifest
    assert list(trusting.json("inspect", demo, "--split", "validation")["splits"]) == ["validation"]


def test_a_token_shard_says_which_part_of_which_file_it_is(demo, tool):
    assert re.search(r"made of +(parquet|jsonl) file with sha256 \w{12}, part \[0, ", tool.out("inspect", shard_in(demo)))


def test_a_sequence_is_its_documents_text_to_the_byte(demo, trusting):
    """What is not text goes to standard error, so that the text can be redirected. Negative numbers count from the end."""
    status, out, err = trusting("inspect", demo, "--sequence", "-263")
    assert status == 0
    assert out.encode() == load_vocabulary(str(DEMO)).decode(flat_tokens.open(demo).train.sequence(0))[0]
    assert re.fullmatch(r"train sequence 0 of 263: \d+ tokens, stories\.parquet row \d+, key [0-9a-f]{16}\n", err)
    said = trusting.json("inspect", demo, "--sequence", "-1", "--split", "validation")
    assert (said["split"], said["sequence"], said["document"]["file"]) == ("validation", 66, "notes.jsonl")
    assert said["ids"] == flat_tokens.open(demo).validation.sequence(66).tolist()


def plain(text: str) -> str:
    """A text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_colours_alternate_by_token_and_stop_at_the_end_of_a_line(demo, trusting, monkeypatch):
    said = trusting.out("inspect", demo, "--sequence", "0", "--color", "always")
    assert plain(said).replace("⏎", "").rstrip("\n") == trusting.out("inspect", demo, "--sequence", "0").rstrip("\n")
    assert all(line.endswith(terminal.RESET) for line in said.split("\n")[:-2])
    assert len({*re.findall(r"\x1b\[38;5;16;48;5;(\d+)m", said)}) == 6
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for no_color, is_colored in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert ("\x1b" in trusting.out("inspect", demo, "--sequence", "0")) is is_colored


def test_a_documents_control_characters_do_not_reach_a_terminal(tmp_path, tool, monkeypatch):
    text = b"a\x1b]0;title\x07\x9b31m\x7f \xe2\x80\xaeb"
    write_sequences(tmp_path / "data", [[byte + 1 for byte in text]])
    show = ["inspect", str(tmp_path / "data"), "--sequence", "0", "--tokenizer", "bytes"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert tool.out(*show, "--color", "never") == "a␛]0;title␇\ufffd31m␡ \ufffdb\n"
    assert "\x1b]" not in tool.out(*show, "--color", "always")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert "\x1b]0;title\x07" in tool.out(*show)


def test_a_character_that_windows_cut_is_whole(tmp_path, tool, monkeypatch):
    text = "é☃😀" * 9
    write_sequences(tmp_path / "data", [[byte + 1 for byte in text.encode()]])
    show = ["inspect", str(tmp_path / "data"), "--sequence", "0", "--tokenizer", "bytes"]
    monkeypatch.setattr(flat_tokens.tools.inspect, "WINDOW_TOKENS", 4)
    assert tool.out(*show) == text
    assert plain(tool.out(*show, "--color", "always")) == text + "\n"


def test_a_limit_says_that_there_are_more(demo, trusting):
    status, out, err = trusting("inspect", demo, "--find", "the", "--limit", "3")
    assert (status, out.count("\n")) == (0, 3)
    assert "there are more than 3" in err
    said = trusting.json("inspect", demo, "--find", "the", "--limit", "0")
    assert said["more"] is False
    assert {match["split"] for match in said["matches"]} == {"train", "validation"}
    assert trusting("inspect", demo, "--find", "not in there at all") == (1, "", "flat-tokens: nothing was found\n")


def test_ids_need_no_tokenizer(tmp_path, tool):
    write_sequences(tmp_path / "data", [[5, 6], [7, 2**31 - 1, 8]])
    path = str(tmp_path / "data")
    status, out, err = tool("inspect", path, "--sequence", "1")
    assert (status, out) == (0, "7 2147483647 8\n")
    assert "no tokenizer is known: ids are shown" in err
    assert tool.out("inspect", path, "--find-ids", "2147483647, 8") == "train 1:1  7 »2147483647 8«\n"
    assert "no tokenizer is known to find text with" in tool.errors("inspect", path, "--find", "x")


def test_other_formats_are_inspected_alike(reference, vocabularies, tool):
    path = str(reference / "modalities/lorem_ipsum.pbin")
    assert "modalities dataset" in tool.out("inspect", path)
    assert "Lo»rem ips«um" in tool.out("inspect", path, "--find", "rem ips", "--tokenizer", "gpt2", "--limit", "1")
