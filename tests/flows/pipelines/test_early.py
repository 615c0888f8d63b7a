"""Runs that could only fail are known from the settings, before they begin."""

import pytest

from tasks.download.sources import fault_of_config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer": "cl100k"}, "there is no tokenizer 'cl100k'. Did you mean 'cl100k_base'?"),
        ({"tokenizer": "nowhere/tokenizer.json"}, "cannot read the tokenizer nowhere/tokenizer.json: No such file"),
        ({"source": {"path": "/nowhere/*.txt"}}, "the source: there are no files at /nowhere/*.txt"),
        (
            {"source": {"path": "s3://b/a.jsonl", "messages_column": "m", "chat_template": "/nowhere/t.jinja"}},
            "there is no chat template at /nowhere/t.jinja",
        ),
        ({"validation_fraction": 2}, "validation_fraction"),
        ({}, None),
        ({"tokenizer": "openai-community/gpt2"}, None),
        ({"source": {"path": "s3://bucket/*.txt"}}, None),
    ],
)
def test_a_fault_is_known_before_there_is_a_run(tmp_path, change, words):
    (tmp_path / "a.txt").write_text("a")
    settings = {"output": str(tmp_path / "out"), "source": {"path": f"{tmp_path}/*.txt"}, "tokenizer": "bytes", **change}
    fault = fault_of_config(settings)
    assert (fault is None) == (words is None)
    assert words is None or words in str(fault)
    assert not (tmp_path / "out").exists()
