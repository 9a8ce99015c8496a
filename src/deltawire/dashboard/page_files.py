"""The files of the page, in the order in which a browser needs them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("page")
SCRIPTS = (
    "text.js",
    "plot.js",
    "chain.js",
    "older.js",
    "channels.js",
    "traffic.js",
    "gates.js",
    "members.js",
    "pauses.js",
    "links.js",
    "tasks.js",
    "training.js",
    "readers.js",
    "details.js",
    "app.js",
)
STYLE = "style.css"
DOCUMENT = "index.html"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


@cache
def page_file(name: str) -> str:
    """Return the text of a file of the page.

    Parameters
    ----------
    name
        One of `SCRIPTS`, `STYLE` or `DOCUMENT`.
    """
    return (_FOLDER / name).read_text(encoding="utf-8")
