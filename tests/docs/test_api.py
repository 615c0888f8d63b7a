"""docs/api.md: every name has an example, and each example prints what is beneath it."""

import contextlib
import io
import re

from tests.docs.programs import ROOT, programs

TEXT = (ROOT / "docs/api.md").read_text("utf-8")


def test_every_name_has_an_example():
    entries = re.split(r"^::: ", TEXT, flags=re.MULTILINE)[1:]
    assert [entry.partition("\n")[0] for entry in entries if not programs(f"## a\n{entry}")] == []


def test_examples_print_what_is_beneath_them(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-output").symlink_to(demo)
    for program in programs(TEXT):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.source, "example", "exec"), {"__name__": "example"})
        assert printed.getvalue() == program.printed, program.source
