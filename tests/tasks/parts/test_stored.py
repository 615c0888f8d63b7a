"""Objects that receipts tell of: asked for once, checked when they come, found again by their digests alone."""

import uuid
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.stores.store import Store, StoredObject, content_digest
from tasks.parts.stored import DigestCache, KnownStore, digest_all
from tests.calls import before_each_call
from tests.refusal import refusal


@pytest.fixture
def root() -> Iterator[Store]:
    root = Store.at(f"memory://{uuid.uuid4().hex}")
    yield root
    root.remove("")


READ = "flat_tokens.stores.store.Store.read_ranges"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys of every question for ranges that reaches a store."""
    return before_each_call(monkeypatch, READ, lambda store, keys, *_: list(keys))


def known(root: Store, *objects: StoredObject, likely: Sequence[bytes] = ()) -> KnownStore:
    return KnownStore.of(root / "shard", objects, likely)


def fresh(name: str) -> bytes:
    """Content that nobody has read before."""
    return f"{name} {uuid.uuid4().hex}".encode()


@pytest.mark.parametrize("ahead", [False, True])
def test_small_objects_are_asked_for_once_together_and_cut_here(root, asked, ahead):
    """When they are read, or when they are fetched ahead."""
    data = {name: fresh(name) for name in ("a", "b")}
    store = known(root, *((root / "shard").put(name, some) for name, some in data.items()))
    if ahead:
        assert store.fetch(["a", "b", "c"]) == {"a": data["a"], "b": data["b"]}
    for _ in range(2):
        found = store.read_ranges(["a", "b", "a"], [0, -3, 2], [4, None, 1000])
        assert found == [data["a"][:4], data["b"][-3:], data["a"][2:]]
    assert asked == [["a", "b"]]


def test_what_most_likely_stands_there_is_not_asked_for_if_its_digest_says_so(root, asked):
    right, other = fresh("right"), fresh("other")
    store = known(root, (root / "shard").put("a", right), (root / "shard").put("b", other), likely=[right, fresh("wrong")])
    assert store.read_ranges(["a", "b"], [0, 0], [100, 100]) == [right, other]
    assert asked == [["b"]]


@pytest.mark.parametrize("now", [b"other bytes!", b"other", b"some bytes!!"], ids=["others", "fewer", "more"])
def test_what_is_not_what_its_receipt_says_is_refused(root, now):
    """Each time: it is not kept as what it should be."""
    stored = (root / "shard").put("a", fresh("some bytes!"))
    (root / "shard").put("a", now)
    for _ in range(2):
        with refusal("shard/a: is not what was written"):
            known(root, stored).read_ranges(["a"], [0], [3])


def test_an_object_that_is_gone_is_missed_where_it_is_not_kept(root):
    stored = StoredObject("a", 5, content_digest(fresh("gone")))
    (answer,) = known(root, stored).read_ranges(["a"], [0], [3])
    assert isinstance(answer, FileNotFoundError)


def test_checking_asks_the_store_whatever_is_kept(root, asked):
    """What was right once says nothing of what is there now. Who reads what was checked does not ask for it again."""
    data = {name: fresh(name) for name in ("a", "b")}
    shard = root / "shard"
    objects = [shard.put(name, some) for name, some in data.items()]
    assert list(digest_all(shard, objects)) == list(digest_all(shard, objects)) == objects
    assert known(root, *objects).read_ranges(["a"], [0], [5]) == [data["a"][:5]]
    assert asked == [["a", "b"]] * 2
    changed = shard.put("a", fresh("a long other one"))
    assert list(digest_all(shard, objects)) == [changed, objects[1]]
    shard.remove("b")
    with pytest.raises(FileNotFoundError):
        list(digest_all(shard, objects))


@given(st.lists(st.integers(0, 9)), st.integers(0, 12))
def test_what_was_used_last_is_kept_within_the_limit(uses, limit):
    """Content n is n bytes; a list says what should be there."""
    kept, model = DigestCache(limit), []
    for n in uses:
        digest = kept.keep(bytes(n))
        model = [*(one for one in model if one != n), n]
        while sum(model) > limit:
            model.pop(0)
        assert kept.find(digest) == (bytes(n) if n in model else None)
    for n in range(10):
        assert kept.find(content_digest(bytes(n))) == (bytes(n) if n in model else None)
