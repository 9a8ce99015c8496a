"""Find sentences in our Markdown pages, and words that are hard to understand.

`python tests/docs/prose.py` puts every sentence on a separate line.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_END_OF_SENTENCE = re.compile(r"(?<=[a-z0-9`)\]*\"'%°²³⁴⁹])([.?!][)*]*) +(?=[A-Z`*\[(\"_+−0-9])")
_CODE = re.compile(r"`[^`]*`")

_OPENING = r"(?:Of|Who|Whoever|Whom|So many|So much|That it|That they|What (?!if|to|it))\b"

STUMBLING_BLOCKS = {
    rf"(?:^(?: *(?:[-*>] |\d+\. ))?|(?<=[.?!:] )|(?<=\| )){_OPENING}": "begin with a subject: who does what",
    r"\b(?:has|have|had) not\b(?! (?:been|yet been)\b| \w+(?:ed|en|un|ne|ad|nt|ld|de|wn|me|ft|und)\b)": "write 'does not have'",
    r"\b(?:nobody|somebody) knows\b": "say what is unknown",
    r"\bwhat then\?": "say it",
    r"\b[Gg]o(?:es)? on\b(?! (?:the|a|to)\b)": "write 'continues'",
    r"\bbeside it\b(?= is)": "say where",
    r"\bby way of\b": "write 'through'",
    r"\bfor want of\b": "write 'without'",
    r"\bto be had\b": "write 'available'",
    r"(?i)\bstands? for\b(?! itself)": "say what it means",
    r"\ball the same\b": "write 'still' or 'nevertheless'",
    r"\btime and again\b": "say how often",
    r"\bfenc(?:e|es|ed|ing)(?: (?:nobody|somebody|anyone|everyone|it|them))? off\b": "write 'fences'",
    r"\balso (?:if|when|while|after)\b": "write 'even if'",
    r"\bany more(?= *(?:$|[.,;:)|\"]))": "write 'no longer' before the verb",
    r"\b(?:waits?|uses?|reads?|needs?|asks?) (?:it |them )?no more(?= *(?:$|[.,;:)|]))": "write 'no longer' before the verb",
    r"\b[Tt]he (?:most|least) (?:probability|value|age)\b": "write 'the largest' or 'the smallest'",
    r"\berrs?\b": "write 'is wrong'",
    r"\b(?:often|whenever|although) one looks\b": "say who looks",
    r"\bof which (?:less|more|there is)\b": "write 'where less', or who has how much",
    r"\bknows? nothing of\b|\bknow nothing\b": "say what is unknown, and to whom",
    r"(?<![Tt]here )\b(?:is|are) no (?:number|list|text|URL|array|origin|bucket|finite)\b": "write 'is not a'",
    r"\bthat is there\b": "write 'existing'",
    r"\ba way (?:leads|to it)\b|\bother way\b|\bway round\b": "write 'route'",
}
"""Patterns that plain English does not need, and what to write instead."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is prose: no code, table, heading, comment, or output of a benchmark."""
    hidden = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") or re.match(r"<!-- (?:end of )?[a-z0-9-]+ -->$", line):
            hidden = not hidden
        elif not hidden and line.strip() and not line.startswith(("|", "#", "<!--", "    ", "![", ":::")):
            yield number, line


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring and comment of a Python module. Each paragraph of a docstring becomes one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            paragraphs = re.split(r"\n\s*(?:\n|-{3,}\n)\s*", node.value.value)
            yield from ((node.lineno, re.sub(r"\s+", " ", paragraph).strip()) for paragraph in paragraphs)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string of a Python module that has several words: errors, help, texts of events.

    The values in an f-string become "…". Docstrings are `remarks`.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in pieces or not isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…" for part in parts)
        if re.search(r"[a-z]+ [a-z]+ [a-z]+", text):
            yield node.lineno, re.sub(r"\s+", " ", text).strip()


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment of a file in C++, CUDA or JavaScript. Comments in consecutive lines are one text."""
    begun, lines = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        found = re.match(r"\s*(?://+|/?\*+)(?:[/!]?) ?(.*?)(?:\*/)?$", line)
        if found:
            begun = begun if lines else number
            lines.append(found[1])
            continue
        if lines:
            yield begun, re.sub(r"\s+", " ", " ".join(lines)).strip()
            lines = []
        if behind := re.search(r"[;{}),] *(?://+|/\*+) ?(.*?)(?:\*/)?$", line):
            yield number, behind[1].strip()


def sentences(line: str) -> list[str]:
    """Return the sentences of a line, without the marker of a list. Full stops within code do not count."""
    text = line[len(_marker(line)) :]
    code = _CODE.findall(text)
    held = _CODE.sub("`\0`", text)
    parts = _END_OF_SENTENCE.sub("\\1\n", held).split("\n")
    found = iter(code)
    return [re.sub("`\0`", lambda _: next(found), part) for part in parts]


def _marker(line: str) -> str:
    """Return what makes a line an item of a list, and its indentation."""
    found = re.match(r" *(?:[-*] +|\d+\. +)?", line)
    assert found is not None
    return found[0]


def one_sentence_per_line(text: str) -> str:
    """Return a page with each sentence of its prose on a separate line."""
    lines = text.splitlines()
    for number, line in prose(text):
        marker = _marker(line)
        lines[number - 1] = marker + f"\n{' ' * len(marker)}".join(sentences(line))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(one_sentence_per_line(page.read_text(encoding="utf-8")), encoding="utf-8")
