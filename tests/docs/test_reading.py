"""docs/reading: every program runs where the demo has been built, and prints what is beneath it."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from flat_tokens.stores.store import Store
from tests.docs.programs import ROOT, printed_by, programs
from tests.faults.stores import BUCKETS

TEXT = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs/reading").glob("*.md")))
PROGRAMS = programs(TEXT)


@pytest.fixture(scope="module")
def s3(demo: Path) -> Iterator[dict[str, str]]:
    """The demo in the bucket ``bucket`` of a server on loopback: the variables of the environment that lead there."""
    with pytest.MonkeyPatch.context() as patch, BUCKETS["s3"](patch) as bucket:
        for path in [demo / "latest.json", *demo.glob("versions/*/**/*")]:
            if path.is_file():
                Store.at(bucket.url).upload(f"{demo.name}/{path.relative_to(demo)}", path)
        yield {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_every_block_of_python_is_a_program_with_its_output():
    assert len(PROGRAMS) == TEXT.count("```python") == TEXT.count("```text") > 15


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=[f"{k}: {program.heading}" for k, program in enumerate(PROGRAMS)])
def test_prints_what_stands_beneath_it(program, demo, tmp_path, request):
    for name in program.frameworks:
        if find_spec(name) is None:
            pytest.skip(f"the program uses {name}, which is not installed")
    environment = request.getfixturevalue("s3") if "s3://" in program.source else {}
    (tmp_path / "demo-output").symlink_to(demo)
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    assert printed_by(program, tmp_path, **environment) == program.printed
