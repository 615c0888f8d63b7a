"""The check of words finds turns of phrase where people read them, and lets a line pass that says why it needs one."""

import pytest

from tests import words


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", '"""What an import came to."""\n', ["the thing by its name: the reader, the result, the caller"]),
        ("a.py", '"""Result of an import."""\n', []),
        ("a.py", '"""Of a source, the files."""\n', ["Y of X"]),
        ("a.py", 'raise ValueError(f"{path} is no dataset")\n', ["is not a"]),
        ("a.py", 'raise ValueError(f"there is no dataset at {path}")\n', []),
        ("a.py", "behind = 1  # behind\n", []),
        ("a.py", 'x = "far behind it"  # plain: a server is late\n', []),
        ("a.md", "The file beside it.\n", ["next to; in addition to; compared with"]),
        ("a.md", "The option `beside`, and [a page](beside.md).\n", []),
        ("a.md", "```\nbeside\n```\n", []),
        ("a.md", "It was told. <!-- plain: a quotation -->\n", []),
    ],
)
def test_turns_of_phrase(name, text, found, tmp_path, monkeypatch):
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    faults = [fault.partition("Write: ")[2].removesuffix(".") for fault in words.faults([tmp_path / name])]
    assert faults == found
