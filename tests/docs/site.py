"""The site's hook for mkdocs: pages of the repository's root, and links that lead to their places on the site.

In the repository, README.md is the first page and docs/README.md the list of all. A link to a file that is no page, such as a
test, becomes its text.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",  # it leads to that page
}
"""Pages whose names differ on the site."""
LINK = re.compile(r"(\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for path, page in PAGES.items():
        if path != "CONTRIBUTING.md":
            files.append(File.generated(config, page, abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page with links as they are on the site."""
    names = {there: here for here, there in PAGES.items() if here != "CONTRIBUTING.md"}
    here = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(link: re.Match[str]) -> str:
        name, _, anchor = link["target"].partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        found = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if found is None or files.get_file_from_path(found) is None:
            return link["text"]
        there = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{there}{'#' if anchor else ''}{anchor}{link[4]}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(on_site, part) for part in parts)
