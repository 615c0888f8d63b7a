"""Planted near-duplicates, and a naive program that finds them: exact sets of shingles, and no hash that decides."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

WORDS = 5
"""Of a shingle."""
WORD = re.compile(r"[^\W_]+")

Int64s = npt.NDArray[np.int64]


def edited(text: str, share: float, scattered: bool, vocabulary: Sequence[str], draw: random.Random) -> str:
    """A text of which a *share* of the words are other ones: here and there, or in one passage."""
    words = text.split(" ")
    count = max(1, round(share * len(words)))
    begin = draw.randrange(len(words) - count + 1)
    for place in draw.sample(range(len(words)), count) if scattered else range(begin, begin + count):
        words[place] = draw.choice(vocabulary)
    return " ".join(words)


def planted(texts: Sequence[str], copies: int, seed: int = 0) -> list[str]:
    """Texts with as many edited copies of some of them among them, at random places: of 1 to 30 % of their words."""
    draw = random.Random(seed)
    vocabulary = sorted({word for text in texts[:500] for word in text.split(" ")})
    long = [text for text in texts if text.count(" ") >= 50]
    more = [edited(draw.choice(long), draw.uniform(0.01, 0.3), draw.random() < 0.5, vocabulary, draw) for _ in range(copies)]
    found = [*texts, *more]
    draw.shuffle(found)
    return found


def shingles_of(texts: Iterable[str]) -> list[Int64s]:
    """The shingles of each text, as numbers: equal numbers, equal shingles."""
    numbers: dict[str, int] = {}
    runs: dict[tuple[int, ...], int] = {}
    found = []
    for text in texts:
        ids = [numbers.setdefault(word, len(numbers)) for word in WORD.findall(text.lower())]
        whole = [tuple(ids[i : i + WORDS]) for i in range(max(1, len(ids) - WORDS + 1))] if ids else []
        found.append(np.unique(np.array([runs.setdefault(run, len(runs)) for run in whole], np.int64)))
    return found


def similar_pairs(shingles: Sequence[Int64s], threshold: float) -> list[tuple[int, int]]:
    """All pairs of texts whose similarity is at least the threshold. Two such texts have one of their rarest shingles in common:
    of n as many as n - threshold * n + 1.
    """
    counts = np.bincount(np.concatenate(shingles))
    owners: dict[int, list[int]] = {}
    pairs = set[tuple[int, int]]()
    for number, mine in enumerate(shingles):
        rarest = mine[np.lexsort((mine, counts[mine]))][: len(mine) - int(np.ceil(threshold * len(mine) - 1e-9)) + 1]
        others = Counter[int]()
        for shingle in rarest[counts[rarest] > 1].tolist():
            others.update(owners.setdefault(shingle, []))
            owners[shingle].append(number)
        for other in others:
            both = len(np.intersect1d(mine, shingles[other], assume_unique=True))
            if both >= threshold * (len(mine) + len(shingles[other]) - both) - 1e-9:
                pairs.add((other, number))
    return sorted(pairs)


def joined(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The clusters that pairs make, of two texts or more."""
    cluster: dict[int, list[int]] = {}
    for pair in pairs:
        one, other = (cluster.setdefault(number, [number]) for number in pair)
        if one is not other:
            one += other
            for number in other:
                cluster[number] = one
    return list({id(mine): sorted(mine) for mine in cluster.values()}.values())


def right_links(found: Iterable[Sequence[int]], truth: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Recall and precision of clusters, by links: a cluster of n texts has n - 1. Those found are right as far as true pairs
    within the found clusters make them.
    """
    home = {number: i for i, mine in enumerate(found) for number in mine}
    truth = list(truth)
    within = [pair for pair in truth if home.get(pair[0], -1) == home.get(pair[1], -2)]
    right, true, all_ = (
        sum(len(mine) - 1 for mine in some)
        for some in (
            joined(within),
            joined(truth),
            (list(mine) for _, mine in itertools.groupby(sorted(home, key=home.__getitem__), home.__getitem__)),
        )
    )
    return right / max(true, 1), right / max(all_, 1)
