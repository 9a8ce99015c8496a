"""The reference of the command line, made from the command line itself."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import typer

from deltawire.cli import app

_HEAD = """# Command line

This page is generated from the program. `deltawire COMMAND --help` prints the same text.

`python -m deltawire` is the same program as `deltawire`.
Most commands take `--json` and then print JSON for machines.
"""


def page() -> str:
    """Return the reference as Markdown: one section for each command, with its arguments and options."""
    group = typer.main.get_command(app)
    by_panel: dict[str, list[Any]] = defaultdict(list)
    for command in group.commands.values():  # type: ignore[attr-defined]
        by_panel[command.rich_help_panel].append(command)
    parts = [_HEAD, _exit_codes(group)]
    for panel, commands in by_panel.items():
        parts.append(f"## {panel}\n")
        parts += [_section(command) for command in commands]
    return "\n".join(parts)


def _exit_codes(group: Any) -> str:
    return f"{group.epilog}\n"


def _section(command: Any) -> str:
    context = command.make_context(command.name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"### deltawire {command.name}", "", "```text", f"deltawire {command.name} {usage}", "```", "", _plain(command.help), ""]
    arguments = [option for option in command.params if option.param_type_name == "argument"]
    options = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
    lines += _table("argument", [(f"`{argument.metavar}`", argument) for argument in arguments])
    lines += _table("option", [(_spelling(option), option) for option in options])
    if command.epilog:
        lines += [_plain(command.epilog), ""]
    return "\n".join(lines)


def _spelling(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or '|'.join(_choices(option)) or 'VALUE'}"
    spellings = sorted([*option.opts, *option.secondary_opts], key=len, reverse=True)
    return ", ".join(f"`{spelling}{value}`" for spelling in spellings)  # a `|` within backticks does not end a cell


def _choices(option: Any) -> list[str]:
    """Return the values that an option accepts; empty if it accepts any."""
    described = getattr(option, "type_descriptor", None) or option.type  # newer and older releases of typer
    return [str(getattr(choice, "value", choice)) for choice in getattr(described, "choices", None) or ()]


def _table(kind: str, rows: list[tuple[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [f"| {kind} | meaning |", "|---|---|", *(f"| {spelling} | {_meaning(option)} |" for spelling, option in rows), ""]


def _meaning(option: Any) -> str:
    text = " ".join((option.help or "").split())
    if option.required:
        text += " Required."
    elif (default := _default(option)) is not None:
        text += f" Default: `{default}`."
    return _escape(text)


def _default(option: Any) -> str | None:
    """Return the default as the user would type it; None if there is none to show."""
    default = option.default
    if default is None or default in ((), []) or callable(default) or not getattr(option, "show_default", True):
        return None
    if isinstance(default, bool):
        return (option.opts if default else option.secondary_opts)[0] if option.secondary_opts else None
    return str(getattr(default, "value", default))


def _plain(text: str | None) -> str:
    """Return help text as Markdown: paragraphs stay, lines within them are joined."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return _escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


def _escape(text: str) -> str:
    """Keep words in angle brackets, stars and bars from becoming markup. Code in backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"[<>*|]", lambda found: "\\" + found[0], piece) for piece in pieces)
