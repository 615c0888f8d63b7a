"""``python -m flows vocabulary`` writes a tokenizer's file, and says how a configuration names it."""

import yaml

from tasks.config import BuildConfig


def test_the_file_and_its_setting(tmp_path, terminal):
    path = tmp_path / "new/x.tiktoken"
    told = terminal.json("vocabulary", "cl100k_base", "--to", path)
    assert path.stat().st_size == told["bytes"] > 1_000_000
    tokenizer = yaml.safe_load(told["tokenizer"])
    config = {"output": "x", "source": {"path": "x.txt"}, "tokenizer": tokenizer}
    assert BuildConfig.model_validate(config).tokenizer.name == str(path)
