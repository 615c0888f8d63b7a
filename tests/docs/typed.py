"""The programs of the documentation have right types: ``python -m tests.docs.typed``, a part of `make check`."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.programs import LINES, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# They may be absent, have no types, or types that change with their releases: all that they give is Any.
OTHERS = "torch torchdata jax grain transformers trl megatron streaming litdata olmo_core modalities datatrove datasets pyarrow"
CONFIGURATION = (
    "[mypy]\npython_version = 3.11\ncheck_untyped_defs = true\nfollow_imports = silent\nignore_missing_imports = true\n"
    + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in OTHERS.split())
)


def programs() -> dict[str, str]:
    """Each block of Python that imports something, by the page and line where it begins, as a module's name."""
    found = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(rf"^```python\n{LINES}```$", text, re.MULTILINE):
            if re.search(r"^(import|from) ", match[1], re.MULTILINE):
                name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
                found[f"{name}_line_{text[: match.start()].count(chr(10)) + 1}"] = match[1]
    return found


def main() -> int:
    """The exit status of mypy over all programs."""
    with tempfile.TemporaryDirectory(prefix="programs-") as directory:
        found = programs()
        for name, source in found.items():
            Path(directory, f"{name}.py").write_text(source, "utf-8")
        configuration = Path(directory, "mypy.ini")
        configuration.write_text(CONFIGURATION, "utf-8")
        cache = ROOT / ".mypy_cache/docs"
        mypy = [sys.executable, "-m", "mypy", f"--config-file={configuration}", f"--cache-dir={cache}", directory]
        done = subprocess.run(mypy, cwd=ROOT, env={"MYPYPATH": str(ROOT)}, check=False)
    print(f"docs: {len(found)} programs")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
