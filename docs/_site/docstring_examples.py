"""An extension of Griffe: examples in docstrings become code blocks. Markdown would take `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^\.\.\.(?: .*)?\n?)*)+", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Puts each run of lines that begin with a prompt into a block, without the prompts."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object when it is loaded."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(_block, obj.docstring.value)


def _block(found: re.Match[str]) -> str:
    lines = re.sub(r"^(?:>>> |\.\.\. ?)", "", found[0].rstrip("\n"), flags=re.MULTILINE)
    return f"```python\n{lines}\n```\n"
