"""The commands that make datasets of datasets: what they say where it does not go as it was meant."""

import re
from argparse import Namespace
from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.callables import get_call_parameters

from flows.commands.main import main
from tasks.derive.request import Shuffle
from tests.made import docs_of, foreign, publish_docs, read_docs


@pytest.mark.parametrize("is_there", [True, False])
def test_appending_to_an_output_of_nothing_gives_the_command_for_a_first_version(tmp_path, terminal, is_there):
    out, more = tmp_path / "out", foreign(tmp_path / "more", [[3]])
    if is_there:
        out.mkdir()
    said = terminal.errors("append", more, "--to", out, "--no-server").strip()
    assert said.startswith(f"flat-tokens-service append: {out} has no latest.json: nothing was published there")
    assert said.endswith(f"python -m flows merge {more} {out}")


@pytest.mark.parametrize("name", ["$HOME/new", "C:\\new", "$(pwd)/new"])
def test_no_command_writes_to_a_directory_that_nobody_meant(tmp_path, monkeypatch, terminal, name):
    plain = foreign(tmp_path / "plain", [[1, 2]])
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("export", plain, name, "--to", "megatron"),
        ("merge", plain, plain, name),
        ("relayout", plain, name, "--layout", "compact"),
        ("vocabulary", "cl100k_base", "--to", f"{name}.tiktoken"),
    ):
        said = terminal.errors(*arguments)
        assert re.search(r"which (only a shell|nothing here) replaces|is a path of Windows", said), said
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_an_export_keeps_to_the_roots(tmp_path, monkeypatch, terminal):
    plain, inside = foreign(tmp_path / "in/plain", [[1, 2]]), tmp_path / "out"
    monkeypatch.setenv("FLAT_TOKENS_INPUT_ROOTS", str(tmp_path / "in"))
    monkeypatch.setenv("FLAT_TOKENS_OUTPUT_ROOTS", str(inside))
    outside = foreign(tmp_path / "plain", [[1, 2]])
    for dataset, output in ((outside, inside / "a"), (plain, tmp_path / "a")):
        said = terminal.errors("export", dataset, output, "--to", "megatron", "--no-server").strip()
        assert "may not be " in said
    terminal.out("export", plain, inside / "a", "--to", "megatron", "--no-server")


@pytest.mark.parametrize(
    ("command", "flow", "told"),
    [
        ("merge A A OUT --name both", "derive-dataset", {"name": "both"}),
        ("append A --to A --workers 2", "derive-dataset", {"workers": 2}),
        ("subset A OUT --count 3", "derive-dataset", {}),
        ("shuffle A OUT --seed 5 --split train", "derive-dataset", {"operation": Shuffle(seed=5, split="train")}),
        ("relayout A OUT --layout compact", "derive-dataset", {"layout": "compact"}),
        ("export A OUT --to megatron --split train", "export-dataset", {"format": "megatron", "split": "train"}),
        ("import A OUT --format megatron", "import-dataset", {}),
        ("retokenize A --tokenizer gpt2 --output OUT", "retokenize-dataset", {}),
        ("build CONFIG --set split_seed=1", "build-dataset", {}),
        ("refresh CONFIG", "refresh-dataset", {"keep_versions": None, "grace_days": 7.0}),
        ("refresh CONFIG --keep 2 --days 1", "refresh-dataset", {"keep_versions": 2, "grace_days": 1.0}),
    ],
)
def test_with_a_server_a_command_runs_its_flow_with_parameters_that_it_takes(tmp_path, monkeypatch, command, flow, told):
    publish_docs(tmp_path / "a", docs_of([1, 2]))
    (tmp_path / "config.yaml").write_text(f"output: {tmp_path / 'out'}\nsource: {{path: {tmp_path / 'a'}}}\ntokenizer: bytes\n")
    places = {"A": tmp_path / "a", "OUT": tmp_path / "out", "CONFIG": tmp_path / "config.yaml"}
    runs = []

    def run(self: Flow[..., Any], *arguments: Any, **settings: Any) -> None:
        given = get_call_parameters(self.fn, arguments, settings)
        self.validate_parameters(given)
        runs.append((self.name, given))
        raise ValueError("that is enough")

    monkeypatch.setattr("flows.commands.running.prefect_server", lambda: "http://127.0.0.1:1/api")
    monkeypatch.setattr(Flow, "__call__", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("flows.commands.build.trusted_config", lambda *_: None)  # the dataset has no record
    assert main([str(places.get(word, word)) for word in f"{command} --quiet".split()]) == 1
    ((name, given),) = runs
    given = {**given, **vars(given.get("request", Namespace()))}
    assert (name, told) == (flow, {setting: given[setting] for setting in told})


def test_commands_publish_and_say_so_once(datasets, tmp_path, terminal):
    a, b = datasets
    out = tmp_path / "out"
    said = terminal.out("merge", a, b, out, "--name", "both")
    assert said.startswith(f"published\n  dataset    {out}/versions/")
    assert terminal.out("merge", a, b, out, "--name", "both").startswith("nothing to do: this version is published\n")
    assert terminal.json("append", b, "--to", out)["sequence"] == 2
    assert len(read_docs(out)["train"]) == 6
    said = terminal.out("subset", out, tmp_path / "chosen", "--source", "web", "--max-tokens", "1", "--name", "short")
    assert "  documents  2 of 7, 4 of other sources, 1 too long\n" in said
    assert terminal.json("relayout", out, out, "--layout", "compact")["layout"] == "compact"


def test_commands_export_and_import(datasets, tmp_path, terminal):
    a, _ = datasets
    files, back = tmp_path / "files", tmp_path / "back"
    told = ("export", a, files, "--to", "jaxformer", "--end-of-text", "99", "--tokens-per-shard", "2")
    assert terminal.out(*told).startswith(f"exported to {files}: jaxformer, ")
    assert "is a flat-tokens dataset already. python -m flows relayout" in terminal.errors("import", a, back)
    told = ("import", files, back, "--end-of-text", 99, "--tokenizer", "bytes", "--name", "again")
    result = terminal.json(*told)
    assert (result["format"], result["totals"]["train"]["seq_count"]) == ("jaxformer", 2)
    assert [doc.ids for doc in read_docs(back)["train"]] == [(1, 2), (3,)]
