"""docs/recipes: each page runs where the demo has been built, and its programs print what stands beneath them."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.programs import ROOT, run

RECIPES = ROOT / "docs/recipes"
PAGES = sorted(path.name for path in RECIPES.glob("*.md") if path.name != "README.md")
PACKAGES = {
    *("torch", "torchdata", "transformers", "accelerate", "datasets", "trl", "megatron", "streaming", "grain", "jax", "litdata"),
    *("olmo_core", "datatrove", "modalities"),
}
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
OTHERS = {"hf-trainer.md", "litdata.md", "maxtext.md", "nanochat.md", "nanotron.md", "olmo-core.md"}
"""Left to the nightly run: a recipe of each kind stays, and the readers of these have tests in ``tests/flat_tokens/formats``."""
STAND_INS = Path(__file__).parent / "stand_ins"
"""torchvision, which Streaming imports for images. transformers would take it for the real one, where a program uses that."""


ALONE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2"}


def steps(page: str) -> list[tuple[str, str, str]]:
    """The commands and programs of a page: kind, source, and what a program prints."""
    return BLOCK.findall((RECIPES / page).read_text("utf-8"))


def missing(page: str) -> list[str]:
    """Packages that a page's programs import, but that are not installed."""
    sources = "".join(source for _, source, _ in steps(page))
    imported = set(re.findall(r"^(?:import|from) (\w+)", sources, re.MULTILINE))
    return sorted(name for name in imported & PACKAGES if find_spec(name) is None)


def test_every_page_is_listed_and_every_program_says_what_it_prints():
    listed = re.findall(r"^\| \[([\w-]+\.md)\]", (RECIPES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == PAGES
    for page in PAGES:
        assert [kind for kind, _, printed in steps(page) if (kind == "python") != bool(printed)] == [], page
        assert len(steps(page)) == len(re.findall(r"^```(?:sh|python)$", (RECIPES / page).read_text(), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.nightly] * (page in OTHERS)) for page in PAGES])
def test_a_recipe_leads_to_the_first_loss(page, demo, tmp_path):
    if absent := missing(page):
        pytest.skip(f"the recipe uses {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed")
    (tmp_path / "demo-output").symlink_to(demo)
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    for kind, source, printed in steps(page):
        if kind == "sh":
            for line in source.splitlines():
                name, *arguments = shlex.split(line)
                assert name == "flat-tokens"
                run(["-m", "flat_tokens", *arguments], tmp_path, **ALONE)
        else:
            (tmp_path / "program.py").write_text(source)
            stand_ins = str(STAND_INS) if "from streaming import" in source and find_spec("torchvision") is None else ""
            found, _ = run(["program.py"], tmp_path, more=stand_ins, HOME=str(tmp_path / "home"), **ALONE)
            assert found == printed
