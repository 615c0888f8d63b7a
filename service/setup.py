"""The service as a wheel: the checkout's tasks, flows and deployments below one package, ``flat_tokens_service``. Nothing of it
is importable under another name. Run by ``make wheels``.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = "flat_tokens_service"
FOLDERS = ("tasks", "flows", "deployments")
KINDS = {".py", ".yaml", ".json", ".jsonl", ".parquet"}

INTO_PACKAGE = (
    (re.compile(r"^(\s*(?:from|import) )(?=(?:tasks|flows|deployments)[. ])", re.MULTILINE), rf"\1{PACKAGE}."),
    # Paths of functions that are imported late, and names of loggers.
    (re.compile(r"""(?<=["'])(?=(?:tasks|flows)(?:\.[\w{]|["']))"""), f"{PACKAGE}."),
    (re.compile(r"(?:python|\{sys\.executable\}) -m flows"), "flat-tokens-service"),
)


class BelowOnePackage(build_py):
    """Writes each source file below the package, with imports that name it."""

    def run(self) -> None:
        made = Path(self.build_lib, PACKAGE)
        made.mkdir(parents=True, exist_ok=True)
        (made / "__init__.py").write_text(
            '"""The service that builds flat-tokens datasets: it has no interface for imports."""\n'
        )
        for path in (path for folder in FOLDERS for path in sorted((CHECKOUT / folder).rglob("*")) if path.suffix in KINDS):
            target = made / path.relative_to(CHECKOUT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(moved(path.read_text("utf-8")).encode() if path.suffix == ".py" else path.read_bytes())

    def find_modules(self) -> list[str]:
        return []

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(path) for path in Path(self.build_lib).rglob("*") if path.is_file()]

    def get_source_files(self) -> list[str]:
        return []


def moved(source: str) -> str:
    """A module's source, whose imports lead below the package."""
    for pattern, replacement in INTO_PACKAGE:
        source = pattern.sub(replacement, source)
    return source


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (CHECKOUT / "flat_tokens/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    setup(
        version=version(),
        install_requires=[f"flat-tokens=={version()}", *groups["service"]],
        packages=[PACKAGE],
        package_dir={PACKAGE: "."},
        cmdclass={"build_py": BelowOnePackage},
    )
