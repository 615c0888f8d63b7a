"""The check of words finds turns of phrase where people read them, and lets a line pass that says why it needs one."""

from tests import words

PROGRAM = '''"""What an import came to."""

def one():
    """Result of an import."""

def other():
    """Of a source, the files."""
    raise ValueError(f"{path} is no dataset")
    raise ValueError(f"there is no dataset at {path}")
    behind = 1  # behind
    x = "far behind it"  # plain: a server is late
'''
PAGE = """The file beside it.

The option `beside`, and [a page](beside.md).

```
beside
```

It was told. <!-- plain: a quotation -->
"""

FAULTS = """\
a.py:1: 'What a'. Write: the thing by its name: the reader, the result, the caller.
a.py:7: 'Of a source,'. Write: Y of X.
a.py:8: 'is no d'. Write: is not a.
a.md:1: 'beside'. Write: next to; in addition to; compared with."""


def test_turns_of_phrase(tmp_path, monkeypatch):
    paths = tmp_path / "a.py", tmp_path / "a.md"
    for path, text in zip(paths, (PROGRAM, PAGE), strict=True):
        path.write_text(text)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert "\n".join(words.faults(paths)) == FAULTS
