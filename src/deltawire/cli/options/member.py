"""Options that `deltawire member` and `deltawire fleet` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from .chain import URL_HELP, check_urls


def _check_engine(text: str) -> str:
    from ...rl.member import parse_engine

    try:
        parse_engine(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    return text


def _check_env(specs: list[str]) -> list[str]:
    for spec in specs:
        module, colon, function = spec.partition(":")
        if not (module and colon and function):
            raise typer.BadParameter(f"{spec!r} does not name a reward function. Write MODULE:FUNCTION, such as my_task:reward.")
    return specs


def check_member_name(name: str | None) -> str | None:
    """Return the name. Raise an error about wrong usage if a member cannot have it."""
    from ...format.records.record_parts import is_reader_name

    if name is not None and not is_reader_name(name):
        raise typer.BadParameter("a name has at most 64 letters, digits, '.', '_' and '-', and does not begin with a dot.")
    return name


SourcesOption: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--from",
        metavar="URL",
        help=f"{URL_HELP} If it is repeated, the first one is the origin, and the others are copies that relays keep.",
        show_default=False,
        callback=check_urls,
    ),
]
EngineOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Generate with `transformers` in this process, or with a vLLM server on this machine: `vllm=http://127.0.0.1:8000`.",
        callback=_check_engine,
    ),
]
EnvOption: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--env",
        metavar="MODULE:FUNCTION",
        help="Score completions with this reward function, which follows TRL's convention. May be repeated.",
        show_default=False,
        callback=_check_env,
    ),
]
DeviceOption: TypeAlias = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Put the model of `transformers` on this device; `auto` prefers a GPU.")
]
MirrorOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--mirror",
        metavar="DIR",
        help="With vLLM: let the server load full checkpoints from a mirror in this directory, and not from the store.",
    ),
]
PollOption: TypeAlias = Annotated[
    float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look for new versions and for work this often.")
]
