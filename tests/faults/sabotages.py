"""Sabotages: changes of the product that lose or damage data some day, and the check that finds each.

A check is the name of a test, or the options of a campaign of the harness. ``test_sabotages.py`` makes each change in a copy of
the source and requires that its check fails there. A check that finds nothing any more is mended, or another one is named.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT, python

PACKAGES = ("flat_tokens", "tasks", "flows")
COPIED = (*PACKAGES, "tests", "deployments", "pyproject.toml", "README.md", "CHANGELOG.md")
SINK, STREAMED = "tests/tasks/assemble/test_spans.py", "tests/flows/pipelines/test_streamed_builds.py"
HAS_ENDED = f"{SINK}::test_a_slice_has_ended_when_its_tokens_and_their_name_are_on_the_disk"


class Sabotage(NamedTuple):
    """A change: ``old`` occurs once in ``file``, and becomes ``new``. ``check``: words behind ``python -m pytest``, or behind
    ``python -m tests.faults`` where they begin with an option.
    """

    name: str
    file: str
    old: str
    new: str
    check: str


SABOTAGES = (
    Sabotage(
        "the sync before a settled mark is left out",
        "flat_tokens/stores/local.py",
        "            os.fsync(self._fd)\n            if not self._is_settled:\n",
        "            if not self._is_settled:\n",
        HAS_ENDED,
    ),
    Sabotage(
        "the directory of unfinished objects is not synced",
        "flat_tokens/stores/local.py",
        "                sync(self._temporary.parent)\n                self._is_settled = True\n",
        "                self._is_settled = True\n",
        HAS_ENDED,
    ),
    Sabotage(
        "a mark is set before its bytes are settled",
        "tasks/assemble/write.py",
        "                for writer in writers.values():\n"
        "                    writer.settle()\n"
        "                for mark in some:\n"
        "                    mark.set_result(None)\n",
        "                for mark in some:\n"
        "                    mark.set_result(None)\n"
        "                for writer in writers.values():\n"
        "                    writer.settle()\n",
        HAS_ENDED,
    ),
    Sabotage(
        "a slice of a span that was given up has ended",
        "tasks/assemble/assembler.py",
        "                raise BrokenStreamError\n        ranges = {split",
        "                continue\n        ranges = {split",
        f"{SINK}::test_a_slice_whose_span_is_given_up_has_not_ended",
    ),
    Sabotage(
        "half a slice stays in the stream when it fails",
        "tasks/assemble/assembler.py",
        "            self.stop()\n            for writer in self._writers.values():\n"
        "                writer.break_off()\n            if compared",
        "            if compared",
        f"{SINK}::test_a_slice_that_fails_takes_none_before_it_along",
    ),
    Sabotage(
        "half a slice stays among the texts that were seen when it fails",
        "tasks/assemble/assembler.py",
        "                compared.take_back()\n",
        "                pass\n",
        f"{SINK}::test_a_slice_that_fails_is_no_copy_of_itself",
    ),
    Sabotage(
        "the digests of what a version left out are not looked at",
        "tasks/shards/index.py",
        "                    check_beside(self.root, version, self._indexes[version])\n",
        "",
        "tests/flows/pipelines/test_dropped_duplicates.py::test_the_next_copy_takes_the_place_of_one_that_leaves",
    ),
    Sabotage(
        "nobody is woken when a writer fails",
        "tasks/assemble/write.py",
        "            self._is_broken = True\n            self._change.notify_all()\n",
        "            self._is_broken = True\n",
        f"{SINK}::test_a_slice_that_waits_for_room_is_woken_when_the_writer_fails",
    ),
    Sabotage(
        "the digests of an unfinished version's tokens are not looked at",
        "tasks/parts/stored.py",
        '            if f"{BLAKE3}{digest.hexdigest()}" != location.of(split).digests.get(name):\n',
        "            if False:\n",
        f"{STREAMED}::test_slices_whose_tokens_are_damaged_are_tokenized_again",
    ),
    Sabotage(
        "the digests of a shard's objects are not looked at",
        "tasks/shards/receipts.py",
        "            if now != stored:\n",
        "            if now.size != stored.size:\n",
        "tests/faults/test_damage.py::test_damage_to_any_file_of_a_shard_is_found_and_the_shard_built_again",
    ),
    Sabotage(
        "a receipt's own digest is not looked at",
        "tasks/shards/receipts.py",
        '    if facts.pop("sha256", None) != digest_of(facts):\n'
        '        raise ValueError("the receipt does not have its own digest")\n',
        '    facts.pop("sha256", None)\n',
        "tests/tasks/shards/test_shards.py::test_no_bit_of_a_receipt_can_flip_into_another_shard",
    ),
    Sabotage(
        "the receipt is stored before the objects",
        "tasks/shards/receipts.py",
        "        with ThreadPoolExecutor(UPLOADERS) as uploaders:\n",
        "        target.put(RECEIPT, receipt_json(draft))\n        with ThreadPoolExecutor(UPLOADERS) as uploaders:\n",
        "tests/tasks/shards/test_shards.py::test_an_object_store_gets_the_receipt_last",
    ),
    Sabotage(
        "a shard gets its name before its files are durable",
        "tasks/shards/receipts.py",
        "    make_durable(staged)\n    make_directory(target.parent)\n",
        "    make_directory(target.parent)\n",
        "tests/tasks/shards/test_shards.py::test_a_shard_survives_a_power_loss_before_it_gets_its_name",
    ),
    Sabotage(
        "the lock of a live attempt's staging is dropped",
        "tasks/output/leases.py",
        "            held.enter_context(locked(lock))\n",
        "            lock.touch()\n",
        "tests/faults/test_staging.py::test_staging_of_a_live_process_stays_and_of_a_dead_one_goes",
    ),
    Sabotage(
        "staging is removed where threads may still move a shard from it",
        "tasks/output/leases.py",
        "        _try_to_remove(home, _moved_away(home, key))\n",
        "        _try_to_remove(home, key)\n",
        "tests/faults/test_staging.py::test_nothing_leaves_a_staging_directory_that_is_being_removed",
    ),
    Sabotage(
        "a build does not lock its output",
        "tasks/output/leases.py",
        "            held.enter_context(_locked(Path(root.root), fcntl.LOCK_SH))\n",
        "            pass\n",
        "tests/tasks/output/test_leases.py::test_a_collection_knows_of_every_build",
    ),
    Sabotage(
        "several processes repair at a time",
        "tasks/shards/receipts.py",
        '    with locked(quarantine / ".lock"):\n',
        "    with contextlib.nullcontext():\n",
        "tests/tasks/shards/test_shards.py::test_one_repairs_at_a_time",
    ),
    Sabotage(
        "objects that no receipt names stay",
        "flows/pipelines/publish.py",
        "        remove_abandoned_objects(root)\n",
        "",
        f"{STREAMED}::test_a_build_that_failed_goes_on_from_the_last_slice",
    ),
    Sabotage(
        "a settled object has no name while it moves to its place",
        "flat_tokens/stores/local.py",
        "                goes = self._in_staging\n",
        "                os.unlink(self._temporary)\n                goes = self._in_staging\n",
        "--only power --under streamed$ --every 4",
    ),
    Sabotage(
        "an object that is whole is not synced",
        "flat_tokens/stores/local.py",
        "                if self._durable:\n                    os.fsync(self._fd)\n",
        "",
        "--only power --under streamed$ --every 7",
    ),
    Sabotage(
        "a version can be opened before it has a manifest",
        "tasks/finalize/seal.py",
        "    store.put(MANIFEST, manifest)\n",
        "    commit(store, LAYOUTS[target.layout])\n    store.put(MANIFEST, manifest)\n",
        "--only kills --under streamed$ --every 2",
    ),
)


def source_of(sabotage: Sabotage, root: Path = ROOT) -> str:
    return (root / sabotage.file).read_text()


def found(sabotage: Sabotage, copy: Path) -> tuple[bool, str]:
    """Make the change in a new copy of the tree at *copy*. Return whether its check fails there, and the end of what it printed.

    TimeoutExpired is a failure of the check, too: a hang that nobody ends.
    """
    for name in COPIED:
        if (ROOT / name).is_dir():
            # With what is compiled, but for files that are being compiled now.
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(ROOT / name, copy / name)
    shutil.rmtree((copy / sabotage.file).parent / "__pycache__", ignore_errors=True)
    (copy / sabotage.file).write_text(source_of(sabotage).replace(sabotage.old, sabotage.new))
    tool = ["tests.faults", "--jobs", "1"] if sabotage.check.startswith("-") else ["pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    run = python("-m", *tool, *sabotage.check.split(), cwd=copy, env=environment, timeout=560)
    # 1: a test failed, or something did not hold. Others: the check could not be made.
    return run.returncode == 1 and "a process of the harness failed" not in run.stderr, (run.stdout + run.stderr)[-3000:]
