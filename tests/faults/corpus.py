"""The real job under kill -9: builds of the corpus, killed at random times, go on behind the last stored shard."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import flat_tokens
from flat_tokens.arrays.layouts import LayoutName
from tasks.config import TokenizerConfig
from tasks.tokenize.tokenizers import load_tokenizer
from tests.faults.commands import Facts, Flaw, command, differences, facts_of, import_all, receipts, tried
from tests.faults.inject import Child, Ended
from tests.faults.support import ROOT

CORPUS = ROOT.parent / "shared" / "corpus"
VOCABULARY = ROOT.parent / "shared" / "vocab" / "tiktoken_cache"
TOKENIZER = "cl100k_base"
KILLS_OF_A_BUILD = 10


class CorpusKills:
    """One build after the other below *scratch*, each killed `KILLS_OF_A_BUILD` times, or until it was faster. Only the
    tokens of the mmap layout are streamed into the version.
    """

    is_there = CORPUS.exists()

    def __init__(self, scratch: Path, layout: LayoutName) -> None:
        self._here, self._layout, self._chance = scratch / "here", layout, random.Random(os.getpid())
        self._log, self._kills, self._undisturbed = scratch / "log", 0, (Facts(), 0.0)

    def _words(self) -> list[str]:
        config = self._here / "corpus.json"
        source = {"path": str(CORPUS), "id_column": "id"}
        settings = {"source": source, "tokenizer": TOKENIZER, "slice_bytes": 4_000_000, "workers": 2, "layout": self._layout}
        config.write_text(json.dumps({"output": str(self._here / "out"), **settings}))
        return ["build", str(config), "--no-server"]

    def _run(self, kill_after: float | None = None) -> Ended:
        words = self._words()

        return Child(lambda: (command(words).status, list(sys.modules)), self._log).ended(kill_after=kill_after)

    def _calm(self) -> tuple[Facts, float]:
        """What an undisturbed build leaves, and how long it takes."""
        if not self._undisturbed[0]:
            self._here.mkdir(parents=True)
            os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
            load_tokenizer(TokenizerConfig(name=TOKENIZER))
            begun = time.monotonic()
            status, modules = self._run().must()
            assert status == 0
            import_all(modules)
            self._undisturbed = facts_of(self._here), time.monotonic() - begun
            shutil.rmtree(self._here / "out")
        return self._undisturbed

    def kill(self) -> list[Flaw]:
        """Kill a build once, look around, and let it come to its end from time to time; what did not hold."""
        _, seconds = self._calm()
        flaws = []
        while True:
            earlier = receipts(self._here)
            ended = self._run(self._chance.uniform(0, seconds / KILLS_OF_A_BUILD * 2))
            if not ended.died:
                flaws += self._completed(ended)
                continue
            later = receipts(self._here)
            flaws += [Flaw("reuse", name) for name, at in earlier.items() if later.get(name, at) != at]
            if (self._here / "out/latest.json").exists():
                _, unreadable = tried(lambda: flat_tokens.verify(self._here / "out"))
                flaws += [Flaw("readers", unreadable)] * bool(unreadable)
            self._kills += 1
            if self._kills % KILLS_OF_A_BUILD == 0:
                flaws += self._completed(self._run())
            return flaws

    def _completed(self, ended: Ended) -> list[Flaw]:
        """Compare a build that came to its end; the next one begins from nothing."""
        facts, _ = self._calm()
        flaws = list(differences(facts_of(self._here), facts))
        if ended.value is None or ended.value[0]:
            flaws.append(Flaw("message", f"it failed: {ended.output}{ended.error}"))
        shutil.rmtree(self._here / "out")
        return flaws
