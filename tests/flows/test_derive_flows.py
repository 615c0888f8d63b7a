"""Operations, exports and imports as Prefect flows against a real server, and as commands without one."""

from pathlib import Path

from flows.build import build_dataset
from flows.forget import forget_documents
from flows.train_tokenizer import train_tokenizer
from tasks.config import BuildConfig
from tasks.derive.request import ForgetRequest
from tasks.vocabularies.request import VocabularyRequest
from tests.faults.support import digests, settings_of, write_notes
from tests.flows.asked import on_prefect_server
from tests.made import read_docs


@on_prefect_server
def test_a_forgetting_is_a_flow(tmp_path):
    """It ends well, and its caller gets what was forgotten."""
    build_dataset(BuildConfig.model_validate(settings_of(tmp_path / "out", write_notes(tmp_path / "in/notes.jsonl", 6))))
    forgotten = forget_documents(ForgetRequest(output=str(tmp_path / "out"), reason="they asked", where="row = 2"))
    assert (forgotten.key_count, forgotten.documents, len(forgotten.versions), forgotten.left) == (1, 1, 1, ())


@on_prefect_server
def test_a_training_is_a_flow_with_a_summary(tmp_path):
    """Of a configuration, and of what it builds; the second one finds what the first has written."""
    config = BuildConfig.model_validate(settings_of(tmp_path / "out", write_notes(tmp_path / "notes.jsonl", 30), name="notes"))
    request, to = VocabularyRequest(vocab_sizes=(262, 264)), str(tmp_path / "to/{name}-{size}")
    trained = train_tokenizer(config, request, to)
    assert [one.path for one in trained.vocabularies] == [str(tmp_path / f"to/notes-{size}") for size in (262, 264)]
    assert train_tokenizer(config, request, to).was_done
    built = build_dataset(config)
    decoded = train_tokenizer(built.path, request, str(tmp_path / "decoded-{size}"))
    assert [one.sha256 for one in decoded.vocabularies] == [one.sha256 for one in trained.vocabularies]


def test_commands_publish_and_say_so_once(datasets, tmp_path, terminal):
    a, b = datasets
    out = tmp_path / "out"
    said = terminal.out("merge", a, b, out, "--name", "both")
    assert said.startswith(f"published\n  dataset    {out}/versions/")
    assert "6 tokens in 4 sequences" in said
    assert "  documents  5 of 5\n" in said
    said = terminal.out("merge", a, b, out, "--name", "both")
    assert said.startswith("nothing to do: this version is published\n")

    assert terminal.json("append", b, "--to", out)["sequence"] == 2
    assert terminal.json("append", b, "--to", out)["was_published"]
    assert len(read_docs(out)["train"]) == 6
    chosen = terminal.json("subset", out, tmp_path / "chosen", "--source", "web", "--max-tokens", "1")
    assert chosen["totals"]["documents"]["skipped"] == {"source": 4, "too_long": 1}
    _, said, _ = terminal("subset", out, tmp_path / "chosen", "--source", "web", "--max-tokens", "1", "--name", "short")
    assert "  documents  2 of 7, 4 of other sources, 1 too long\n" in said
    mixed = [terminal.json("shuffle", out, tmp_path / name, "--seed", 5, "--workers", 1) for name in ("m", "n")]
    assert digests(Path(mixed[0]["path"])) == digests(Path(mixed[1]["path"]))
    assert "there is no split 'test'; there are train, validation" in terminal.errors(
        "shuffle", out, tmp_path / "o", "--split", "test"
    )
    assert terminal.json("relayout", out, out, "--layout", "compact")["layout"] == "compact"


def test_commands_export_and_import(datasets, tmp_path, terminal):
    a, _ = datasets
    files, back = tmp_path / "files", tmp_path / "back"
    status, said, _ = terminal("export", a, files, "--to", "jaxformer", "--end-of-text", "99", "--tokens-per-shard", "2")
    assert (status, said.startswith(f"exported to {files}: jaxformer, ")) == (0, True)
    told = ("export", a, files, "--to", "jaxformer", "--end-of-text", "99", "--tokens-per-shard", "2")
    assert terminal.json(*told)["was_done"]
    assert "is a flat-tokens dataset already. python -m flows relayout" in terminal.errors("import", a, back)
    result = terminal.json("import", files, back, "--end-of-text", 99, "--tokenizer", "bytes", "--name", "again")
    assert (result["format"], result["totals"]["train"]["seq_count"]) == ("jaxformer", 2)
    assert [doc.ids for doc in read_docs(back)["train"]] == [(1, 2), (3,)]
    assert terminal.json("import", files, back, "--end-of-text", 99, "--tokenizer", "bytes", "--name", "again")["was_published"]
