"""Options of the public functions: a value that is not one of an option's own is refused by name, before anything is done."""

import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import BucketedLoader, FillInMiddle, Ledger, Mixture, Schedule, ShuffledLoader, TokenBatch
from flat_tokens.formats import FORMATS, open_any
from flat_tokens.options import digits
from flat_tokens.stores.retry import own_status, retry_after
from flat_tokens.tools.export import export_of, import_dataset, write
from tests.flat_tokens.rows.rows_by_number import Numbers
from tests.refusal import refusal

BATCH = TokenBatch.from_sequences([[1, 2, 3], [4, 5]])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, which nothing changes."""
    root = tmp_path_factory.mktemp("options")
    flat_tokens.write_dataset(root / "dataset", [BATCH])
    return root / "dataset"


Call = Callable[[Path, Any], object]
VIEWS = ("packed", "documents", "blocks", "packed_documents")


def made(name: str, option: str) -> Call:
    return lambda path, value: getattr(flat_tokens.open(path).train, name)(4, **{option: value})


def loaded(option: str) -> Call:
    return lambda _, value: ShuffledLoader(Numbers(5), 4, **{option: value})


def bucketed(option: str) -> Call:
    return lambda path, value: BucketedLoader(flat_tokens.open(path).train, [4], 8, **{option: value})


CHOICES: dict[str, tuple[Call, str]] = {
    "verify level": (lambda path, value: flat_tokens.verify(path, value), "level is .* one of quick, full"),
    "write_dataset layout": (
        lambda path, value: flat_tokens.write_dataset(path / "new", [BATCH], layout=value),
        "layout is .* one of mmap, compact, zarr2",
    ),
    "import_dataset layout": (
        lambda path, value: import_dataset(path, path.parent / "new", layout=value),
        "layout is .* one of mmap, compact, zarr2",
    ),
    "import_dataset format": (
        lambda path, value: import_dataset(path, path.parent / "new", value),
        "there is no format .* flat-tokens, modalities, ",
    ),
    "open_any format": (lambda path, value: open_any(path, value), "there is no format .* flat-tokens, modalities, "),
    "export format": (lambda path, value: export_of(path, value, {}), "there is no format .* modalities, megatron"),
    "export split": (lambda path, value: export_of(path, "megatron", {}, [value]), "a split is .* one of train, validation"),
    "schedule by": (lambda _, value: Schedule([(0, 1)], value), "by is .* one of sample, step, token"),
    "schedule kind": (lambda _, value: Schedule([(0, 1)], "step", value), "kind is .* one of linear, constant"),
    "loader order": (
        loaded("order"),
        "order is .*'shuffled', 'sequential', a ReferenceOrder",
    ),
    "fit": (made("packed_documents", "fit"), "fit is .* one of greedy, best"),
    "too_long": (made("packed_documents", "too_long"), "too_long is .* one of error, cut"),
    "cuts": (lambda _, value: FillInMiddle(1, 0, 1, 2, 3, cuts=value), "cuts is .* one of tokens, characters"),
    **{f"{name} framework": (made(name, "framework"), "framework is .* one of numpy, torch, jax") for name in VIEWS},
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are(path, name):
    call, complaint = CHOICES[name]
    before = sorted(path.parent.rglob("*"))
    recognises = name in ("import_dataset format", "open_any format")
    for value in ("Full", "", True, 7, ["full"], np.array(["full", "quick"]), *([] if recognises else [None])):
        with refusal(complaint):
            call(path, value)
    assert sorted(path.parent.rglob("*")) == before


TRUTHS: dict[str, Call] = {
    "drop_last": loaded("drop_last"),
    "balance": lambda path, value: ShuffledLoader(flat_tokens.open(path).train.packed_documents(4), 4, balance=value),
    "trust_records": lambda path, value: Ledger.open(path / "no.json", trust_records=value),
    "each_epoch": lambda _, value: FillInMiddle(1, 0, 1, 2, 3, each_epoch=value),
    "split_across_pack": made("packed_documents", "split_across_pack"),
    "causal_padding": lambda path, value: flat_tokens.open(path).train.packed_documents(4)[0].mask(causal_padding=value),
    **{f"loss_mask of {name}": made(name, "loss_mask") for name in VIEWS},
    "loss_mask of buckets": bucketed("loss_mask"),
    "drop_last of buckets": bucketed("drop_last"),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_truth_value_is_true_or_false(path, name):
    """The text "false" would count as true."""
    for value in ("false", "no", 0, []):
        with refusal(rf"{name.split()[0]} is {re.escape(repr(value))}, but it is True or False"):
            TRUTHS[name](path, value)


WHOLE: dict[str, Call] = {
    "threads": lambda path, value: flat_tokens.verify(path, threads=value),
    "cache_bytes": lambda path, value: flat_tokens.open(path, cache=path, cache_bytes=value),
    "read_ahead": lambda path, value: flat_tokens.open(path, read_ahead=value),
    "batch_size": lambda _, value: ShuffledLoader(Numbers(5), value),
    **{name: loaded(name) for name in ("seed", "epochs", "start", "start_token")},
    "prefetch": lambda _, value: ShuffledLoader(Numbers(5), 4).steps(prefetch=value),
    "stop": lambda _, value: ShuffledLoader(Numbers(5), 4).steps(0, value),
    "process_count": lambda _, value: ShuffledLoader(Numbers(5), 4).shard(0, value),
    "steps": lambda _, value: Mixture([(Numbers(5), 1)], 4, steps=value),
    "streams": lambda _, value: flat_tokens.BlockOrder(4, 2, value),
    "length": made("packed", "overlap"),
    **{name: made("packed_documents", name) for name in ("max_packs", "padding_idx", "pad_to")},
    "pad_id": made("documents", "pad_id"),
    "multiple_of": bucketed("multiple_of"),
    "bos": made("packed", "bos"),
    "eos": made("blocks", "eos"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number_is_refused_by_name(path, name):
    with refusal(r"\w+ is '4', but it is a whole number", TypeError):
        WHOLE[name](path, "4")


def test_there_is_a_thread(path):
    with refusal("threads is 0, but it is 1 or more"):
        flat_tokens.verify(path, threads=0)


def closed(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """The options of a format, each with a value that it cannot have."""
    for name, hint in typing.get_type_hints(kind).items():
        kinds = typing.get_args(hint) or (hint,)
        yield name, ["x"] if str in kinds else "no such value"


@pytest.mark.parametrize(
    ("format", "option", "value"), [(name, *one) for name, entry in FORMATS.items() for one in closed(entry.options)]
)
def test_an_option_of_a_format_is_refused_by_name(path, format, option, value):
    with refusal(rf"{option} is {re.escape(repr(value))}, but it is "):
        export_of(path, format, {option: value})
    with refusal(rf"{format} has no option 'no_such_option'; it has .*{option}"):
        export_of(path, format, {"no_such_option": 1})


def test_options_of_another_format_are_refused(path, tmp_path):
    write(export_of(path, "megatron", {}), str(tmp_path / "out"))
    for options in (FORMATS["parquet"].options(), {"sequence": "document"}):
        with refusal(r"options are .*, but those of megatron are Megatron, with .*sequence", TypeError):
            open_any(tmp_path / "out", "megatron", options)
    with refusal("flat-tokens has none", TypeError):
        open_any(path, options=FORMATS["parquet"].options())


def test_digits_from_elsewhere():
    right = {"0": 0, b"017": 17, str(2**63 - 1): 2**63 - 1}
    wrong = [str(2**63), "9" * 5000, "\u00b2", "\u0663", b"\xb2", "", "-1", "1_0", None]
    assert [*map(digits, [*right, *wrong])] == [*right.values(), *[None] * len(wrong)]


@pytest.mark.parametrize("said", ["9" * 5000, "\u00b2"])
def test_numbers_of_servers_that_are_none(said):
    error = OSError()
    error.response = SimpleNamespace(headers={"Retry-After": said}, status_code=said)  # type: ignore[attr-defined]
    assert (retry_after(error), own_status(error)) == (0.0, None)
