"""Mistakes in the arguments of both programs: one line with the next step, status 2, and nothing heavy imported for it."""

import json
from itertools import chain

import pytest

from flat_tokens.tools import cli
from flows.commands.main import FAMILIES, main
from tests.made import docs_of, foreign, publish_docs
from tests.processes import python

HEAVY = ("prefect", "pyarrow", "tokenizers")
PROGRAM = """
import contextlib, io, json, sys
from flat_tokens.tools import cli
from flows.commands import main
for program, *arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = (main if program == "flat-tokens-service" else cli).main(arguments)
    print(json.dumps([said.getvalue().splitlines(), status, [name for name in sys.argv[1:] if name in sys.modules]]))
"""

NOTHING = "there is nothing at OUTT. Did you mean OUT?"
MISTAKES = {
    "inspct OUT": "there is no 'inspct'. Did you mean 'inspect'?",
    "inspect OUT --sequnce 1": "there is no argument '--sequnce'. Did you mean '--sequence'?",
    "export OUT NEW --to megatrn": "argument --to: there is no 'megatrn'. Did you mean 'megatron'?",
    "import OUTT NEW": "there is nothing here. Did you mean: OUT?",
    **{f"{name} OUTT": "there is nothing here. Did you mean: OUT?" for name in ("inspect", "stats", "verify", "documents")},
    "completion bsh": "there is no 'bsh'. Did you mean 'bash'?",
    "inspect OUT --sequence 1": "there is no sequence 1; there are 1",
    **{f"inspect OUT --find-ids={wrong}": "is not a list of token ids from 0 to 2147483647" for wrong in ("x", -1, 1 << 31, 1.5)},
    "inspect HERE/plain --find=": "--find needs a text that is not empty",
    "compare OUT": "name two versions or more",
    "trace OUT --sequence 1": "there is no sequence 1 in train; there are 1",
    "trace OUT --token 2": "there is no token 2; there are 2",
    "trace OUT --sequence 0 --split test": "there is no split 'test'",
    "trace OUT --step 1": "--step needs the run's --batch-size and --length",
    **{
        f"trace OUT --batch-size 1 --length 2 --step {more}": words
        for more, words in {
            "999999": "there is no step 999999",
            "0 --row 1": "there is no row 1 in step 0; there are 1",
            "0 --view blocks --overlap 1": "--overlap is of packed",
        }.items()
    },
}
MISTAKES_OF_SERVICE = {
    "biuld CONFIG": "there is no 'biuld'. Did you mean 'build'?",
    "build": "the following arguments are required: ",
    **{
        f"{command} {arguments}{more}": words
        for command, more in {
            "build": "",
            "plan": "",
            "refresh": "",
            "retokenize": " --tokenizer bytes",
            "train-tokenizer": " --vocab-size 300",
        }.items()
        for arguments, words in {
            "CONFIGG": "there is nothing at CONFIGG. Did you mean CONFIG?",
            "CONFIG --set source.path=HERE/in/*.jsnl": "there are no files at HERE/in/*.jsnl. Did you mean HERE/in/*.jsonl?",
            "CONFIG --set tokenizer=gtp2": "there is no tokenizer 'gtp2'. Did you mean 'gpt2'?",
            "CONFIG --set tokenizer=HERE/tokeniser.json": "Did you mean HERE/tokenizer.json?",
            "CONFIG --set source.format=parqet": "not 'parqet'. Did you mean 'parquet'?",
            "CONFIG --set name=a/b": "name: should be letters, digits, dots, dashes and underscores, of which",
        }.items()
    },
    **{
        f"{command} OUTT{more}": NOTHING
        for command, more in {
            "refresh": "",
            "retokenize": " --tokenizer bytes",
            "train-tokenizer": " --vocab-size 300",
            "merge": " OUT NEW",
            "append": " --to OUT",
            "subset": " NEW --count 1",
            "shuffle": " NEW",
            "relayout": " NEW --layout mmap",
            "export": " NEW --to megatron",
            "import": " NEW",
            "publish": " --to hub a/b",
            **dict.fromkeys(("status", "versions", "pin", "rollback", "gc"), ""),
            "approve": " --reason x",
            "reject": " --reason x",
            "forget": " --source x --reason x",
            "unpin": " x",
        }.items()
    },
    "retokenize OUT --tokenizer gtp2": "there is no tokenizer 'gtp2'. Did you mean 'gpt2'?",
    "import OUT NEW --tokenizer gtp2": "there is no tokenizer 'gtp2'. Did you mean 'gpt2'?",
    "vocabulary gtp2 --to x.tiktoken": "there is no tokenizer 'gtp2'. Did you mean 'gpt2'?",
    "vocabulary gpt2 --to x": "has to end with .tiktoken",
    "vocabulary a/b --to x.tiktoken": "end with .json",
    "vocabulary bytes --to x.tiktoken": "another machine",
    "append OUT --to HERE/plain": "python -m flows merge HERE/plain OUT ",
    "append HERE/plain --to OUT/latest": "Append to the output that it belongs to: --to OUT",
    "subset OUT NEW": "a subset needs a filter: count, drop, fraction, id_list, key_list",
    "subset OUT NEW --fraction 0.5 --count 3": "a fraction or a count, not both",
    "subset OUT NEW --min-tokens 5 --max-tokens 4": "min_tokens 5 is above max_tokens 4",
    "subset OUT NEW --keys HERE/keys --ids HERE/keys": "by keys or by ids, not both",
    "subset OUT NEW --min-tokens 1 --split train --drop train": "split and drop are both train",
    "subset OUT NEW --where nosuch=1": "there is no column 'nosuch'; there are tokens, source, file, row, key",
    "subset OUT NEW --fraction 2": "fraction: should be less than or equal to 1, not 2.0",
    "shuffle OUT NEW --seed -1": "seed: should be greater than or equal to 0",
    "relayout OUT NEW": "relayout needs a layout",
    "relayout OUT http://host/x --layout mmap": "output: nothing can be written to http",
    "subset OUT NEW --keys HERE/kesy": "there is nothing at HERE/kesy. Did you mean HERE/keys?",
    "shuffle OUT NEW --workers 0": "workers: should be greater than or equal to 1",
    "versions s3://key:secret@host/x": "carries credentials",
    "merge OUT s3://key:secret@host/x": "carries credentials",
    "publish OUT --to hub x": "repo: should be ORG/NAME",
    "publish OUT --to hib a/b": "datasets are published on the hub",
    "train-tokenizer --from OUTT --vocab-size 300": NOTHING,
    "train-tokenizer CONFIG --vocab-size 300 --pattern gtp4": "there is no pattern 'gtp4'. Did you mean 'gpt4'?",
    "train-tokenizer CONFIG --vocab-size x": "--vocab-size x: 'x' is not a whole number",
    "train-tokenizer CONFIG --vocab-size 12": "greater than 256",
    "train-tokenizer --vocab-size 300": "_OR_DATASET, --run and --from",
    "train-tokenizer CONFIG --from OUT --vocab-size 300": "takes one of",
    "train-tokenizer --run OUT --vocab-size 300": "--run and --step belong together",
    "train-tokenizer OUT --set a=b --vocab-size 300": "--set changes a configuration file",
    "forget OUT --reason x": "documents are named by one of keys, ids, where or like",
    "rollback OUT zzz": "no version begins with 'zzz'",
    "rollback OUT": "no version before",
    "unpin OUT zzz": "is not pinned",
    "refresh CONFIG --days 3": "give --keep, too",
    "refresh OUT --set split_seed=1": "but a dataset is given",
    'retokenize CONFIG --tokenizer {"nam":x}': "unknown key 'nam'. Did you mean 'name'?",
    **{
        f"build CONFIG --set {setting}": words
        for setting, words in {
            "tokenizr=gpt2": "unknown key 'tokenizr'. Did you mean 'tokenizer'?",
            "validation_fraction=.nan": "validation_fraction",
            "tokenizer": "--set tokenizer: write KEY=VALUE, such as --set tokenizer=gpt2",
            "=3": "--set : write KEY=VALUE",
            'tokenizer={"name":a,"name":b}': "the value: the key 'name' is in line 1 and again in line 1; remove one",
            "sources.1.path=x": "--set sources.1.path: there is no item '1'; there are 1, counted from 0",
            "sources.first.path=x": "--set sources.first.path: there is no item 'first'",
            "output.path=x": "--set output.path: 'output' has no settings within",
            "source.0.path=x": "--set source.0.path: 'source' is not a list, so it has no item '0'",
            "source.text_column.name=x": "source.text_column: should be text, not a mapping",
            "documents.on_bad=": "documents.on_bad: should be 'error', 'skip' or 'replace', not nothing",
            "documents.onbad=skip": "unknown key 'documents.onbad'. Did you mean 'on_bad'?",
            "on_bad=skip": "unknown key 'on_bad'. Did you mean 'documents.on_bad'?",
            "source.path=s3://key:secret@host/x": "carries credentials",
            "source.path={s3://key:secret@host:": "--set source.path: the value is not YAML",
        }.items()
    },
}


def test_a_mistake_is_one_line_and_imports_nothing_heavy(tmp_path):
    publish_docs(tmp_path / "out", docs_of([1, 2]))
    foreign(tmp_path / "plain", [[1, 2]])
    (tmp_path / "in").mkdir()
    for name in ("in/a.jsonl", "keys", "tokenizer.json"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "config.yaml").write_text(f"output: {tmp_path}/new\nsource: {{path: {tmp_path}/in}}\ntokenizer: bytes\n")
    places = {"CONFIG": tmp_path / "config.yaml", "OUT": tmp_path / "out", "NEW": tmp_path / "new", "HERE": tmp_path}

    def placed(words: str) -> str:
        for name, path in places.items():
            words = words.replace(name, str(path))
        return words

    rows = [("flat-tokens", *row) for row in MISTAKES.items()]
    rows += [("flat-tokens-service", *row) for row in MISTAKES_OF_SERVICE.items()]
    given = json.dumps([[program, *placed(words).split()] for program, words, _ in rows])
    done = python("-c", PROGRAM, *HEAVY, input=given, check=True)
    for (program, words, expected), line in zip(rows, done.stdout.splitlines(), strict=True):
        said, status, imported = json.loads(line)
        assert (status, imported, len(said)) == (2, [], 1), (words, said)
        assert said[0].startswith(f"{program}")
        assert placed(expected) in said[0], words
        assert "secret" not in said[0]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        *(("flat-tokens", name) for name in chain(*cli.FAMILIES.values())),
        *(("flat-tokens-service", name) for name in chain(*FAMILIES.values())),
    ],
)
def test_help_has_description_options_examples_and_statuses(program, name, capsys):
    assert (cli.main if program == "flat-tokens" else main)([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {program} {name} ")
    assert f"{program} {name}" in said.partition("example")[2]
    assert [word for word in ("--quiet", "--color", "--json", "exit status:\n  0  ", "\n  2  ") if word not in said] == []
    assert "%" not in said
