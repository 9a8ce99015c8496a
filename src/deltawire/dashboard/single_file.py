"""Writes the page with its data as one file, which needs neither a server nor a network."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DeltawireError
from .observer import Observer
from .page_files import DOCUMENT, SCRIPTS, STYLE, page_file
from .plain_values import short

_MOST_DETAIL_BYTES = 16 << 20
"""The details of versions in one file take at most this many bytes."""


def write_report(observer: Observer, path: Path | str, *, details: int = 8, notes: Sequence[str] = ()) -> int:
    """Write what an observer has seen to one HTML file. Return the number of its bytes.

    An existing file is replaced only when the new one is complete. Raises `OSError` if no file can be written there.

    Parameters
    ----------
    observer
        What to write. Call `look` first.
    path
        The file.
    details
        The number of newest versions whose details the file holds.
    notes
        Sentences of your own, which stand at the top of the page.
    """
    target = _output(Path(path))
    text = report_text(observer, details=details, notes=notes).encode()
    if target.exists() and not target.is_file():  # a device or a pipe, such as /dev/stdout
        target.write_bytes(text)
        return len(text)
    handle, staged = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        Path(staged).chmod(0o644)
        os.replace(staged, target)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
    return len(text)


def _output(path: Path) -> Path:
    """Return the path to write to, where links lead, and make its directory. Raises `OSError` if no file can be written there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        return path
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    return target


def report_text(observer: Observer, *, details: int = 8, notes: Sequence[str] = ()) -> str:
    """Return the page with its data as one HTML document.

    Parameters
    ----------
    observer
        What to write.
    details
        The number of newest versions whose details the document holds.
    notes
        Sentences of your own, which stand at the top of the page.
    """
    sections = observer.sections() | {"notes": [short(note, 1000) for note in notes]}
    sections["details"] = _details(observer, details)
    style, scripts = page_file(STYLE), [page_file(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {' '.join(repr(_hash(script)) for script in scripts)}; "
        "base-uri 'none'; form-action 'none'"
    )
    document = page_file(DOCUMENT)
    head, _, rest = document.partition("<!-- style -->")
    _, _, rest = rest.partition("<!-- /style -->")
    body, _, rest = rest.partition("<!-- scripts -->")
    _, _, end = rest.partition("<!-- /scripts -->")
    return "".join(
        [
            head,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>',
            body,
            f'<script type="application/json" id="data">{_embedded(sections)}</script>\n',
            *(f"<script>{script}</script>\n" for script in scripts),
            end,
        ]
    )


def _details(observer: Observer, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    size = 0
    for seq in observer.newest_versions[:count]:
        try:
            details = observer.version(seq=seq)
        except DeltawireError as error:
            details = {"seq": seq, "kind": "unknown", "problem": str(error)}
        size += len(json.dumps(details))
        if size > _MOST_DETAIL_BYTES:
            break
        found[str(seq)] = details
    return found


def _embedded(value: Any) -> str:
    """Return JSON that cannot end the element that it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
