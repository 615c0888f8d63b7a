"""The successor of a version: the same without what is forgotten, written of its own documents."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flows.pipelines.stages import COUNT, FINALIZE, ThreadRunner, assembled, in_order
from tasks.config import available_cores
from tasks.derive.choice import Selection, positioned
from tasks.derive.inputs import cut_inputs, examine, splits_in, token_bytes_of
from tasks.derive.provenance import DerivedProvenance
from tasks.derive.provenance import card as card_of_derived
from tasks.derive.without import (
    OfVersion,
    copy_origin,
    facts_beside,
    keeps_clusters,
    left_out_by,
    lost_by_source,
    made_without,
    renamed_clusters,
    successor_shards,
    totals_without,
)
from tasks.finalize.card import card as card_of_build
from tasks.finalize.provenance import build_id
from tasks.finalize.seal import VersionDraft
from tasks.forget.documents import table_of
from tasks.output.leases import attempt
from tasks.output.paths import version_store
from tasks.output.pointer import is_dataset
from tasks.output.target import Target
from tasks.shards.index import read_index


def make_successor(root: Store, scratch: Path, forgotten: Forgotten, of: OfVersion) -> str:
    """Write the successor of a version that holds forgotten documents, unless it is there. Return its name."""
    former = read_manifest(version_store(root, of.version))
    made_of, layout = made_without(of.version, former["provenance"], forgotten), former["layout"]
    name = build_id(made_of, layout)
    if is_dataset(root, name):
        copy_origin(root, name, of.version)
        return name
    one, index = examine(version_store(root, of.version).url), read_index(root, of.version)
    with ThreadRunner(cores := available_cores(), cores) as runner, attempt(root, scratch, name) as workspace:
        target = Target(
            workspace=workspace,
            name=name,
            layout=layout,
            splits=splits_in([one]),
            facts=one.stored_facts,
            token_arrays=one.token_arrays,
            columns=one.columns,
            **facts_beside(root, of.version, index),
        )
        near = Counter[int]()
        if keeps_clusters(former):
            renamed, near = renamed_clusters(table_of(root, of.version), forgotten)
            target = target.model_copy(update={"clusters": "clusters"})
            workspace.write(target.clusters, renamed)
        parts, selection = (
            [*cut_inputs([one], None), *cut_inputs([left_out_by(one, target)], None)],
            Selection(forgotten=forgotten.sha256),
        )
        counted = list(zip(parts, in_order(runner, parts, COUNT.given(target, selection)), strict=True))
        written = assembled(runner, target, [part for split in target.every_split for part in positioned(counted, split)])
        draft = VersionDraft(
            made_of,
            written,
            partial(totals_without, former, lost_by_source(of, former, near)),
            card_of_derived if isinstance(made_of, DerivedProvenance) else card_of_build,
            partial(token_bytes_of, made_of.tokenizer, [one]),
            successor_shards(target, index, forgotten, of),
        )
        runner.start(target, FINALIZE.given(draft, "quick")).result()
    copy_origin(root, name, of.version)
    return name
