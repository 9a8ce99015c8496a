"""Hooks that MkDocs runs when it builds the site (mkdocs.yml).

They add the pages that are made from other files: the references of the command line and of the API, and the Markdown files of the
repository's root. After the build they make sure that no page loads anything from another host.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import api_reference
import cli_reference

ROOT = Path(__file__).resolve().parents[2]
FROM_THE_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Pages that are files of the repository's root, so that code hosts show them too."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "cli.md", content=cli_reference.page()))
    for name, listed in api_reference.PAGES.items():
        files.append(File.generated(config, f"api/{name}.md", content=listed.markdown()))
    for name, page in FROM_THE_ROOT.items():
        files.append(File.generated(config, page, content=as_page((ROOT / name).read_text(encoding="utf-8"))))
    return files


def as_page(text: str) -> str:
    """Return Markdown of the repository's root with links that are right in the docs folder."""
    for name, page in FROM_THE_ROOT.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")


_ELSEWHERE = r"""=["']?(?:https?:)?//"""
_LOADED = re.compile(
    rf"""<(?:script|img|iframe|source)\b[^>]*\bsrc{_ELSEWHERE}"""
    rf"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref{_ELSEWHERE}"""
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads anything from another host."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output
