"""The ceiling counts what runs, and fails if there is more of it."""

import subprocess

import pytest

from tests.size import code_tokens, faults


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = 1\n", 3),
        ('"""A docstring\nof two lines."""\nx = 1  # a comment\n\n\n', 3),
        ('def f():\n    """Return."""\n    return (\n        1,\n    )\n', 10),
        ('x = f"{y} and {f(1)}"\n', 3),
        ("x = '''two\nlines'''\n", 3),
    ],
)
def test_code_tokens(source, count):
    assert code_tokens(source) == count


def test_more_than_the_ceiling_is_a_fault_and_so_is_a_folder_of_more_than_15_modules(tmp_path):
    """The file that makes it a package is not counted, nor are folders of tests."""
    names = [f"{folder}/{name}.py" for folder in ("full", "tests") for name in ("__init__", *map("m{}".format, range(16)))]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / names[-1]).write_text("x = 1\n")
    (tmp_path / names[0]).write_text("x = 1 + 1\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / "pyproject.toml").write_text("[tool.flat-tokens.ceiling]\nproduct = 5\ntests = 2\n")
    modules = "full has 16 modules, more than 15. Merge what is one thing, or divide the folder."
    told = "tests has 3 code tokens; its ceiling in pyproject.toml is 2. Remove as much as you add."
    assert faults(tmp_path) == [told, modules]
    (tmp_path / "full/m0.py").unlink()
    assert faults(tmp_path) == [told]
