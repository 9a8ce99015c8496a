"""What `deltawire member` and `deltawire fleet` share: how a member is told what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from .chain_options import check_url


def _check_engine(text: str) -> str:
    from ..rl.member import parse_engine

    try:
        parse_engine(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    return text


def _check_env(specs: list[str]) -> list[str]:
    for spec in specs:
        module, colon, function = spec.partition(":")
        if not (module and colon and function):
            raise typer.BadParameter(f"{spec!r} names no reward function. Write MODULE:FUNCTION, such as my_task:reward.")
    return specs


def check_member_name(name: str | None) -> str | None:
    from ..format.records.chain_records import is_reader_name

    if name is not None and not is_reader_name(name):
        raise typer.BadParameter("a name has letters, digits, '.', '_' and '-', at most 64, and does not begin with a dot.")
    return name


SourceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="URL",
        help="Where the run is: a directory, s3://BUCKET/PREFIX, gs://..., az://..., or hf://buckets/OWNER/NAME.",
        show_default=False,
        callback=check_url,
    ),
]
EngineOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="What generates: `transformers` in this process, or `vllm=http://127.0.0.1:8000`, a server on this machine.",
        callback=_check_engine,
    ),
]
EnvOption: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--env",
        metavar="MODULE:FUNCTION",
        help="A reward function, by TRL's convention; may be given several times.",
        show_default=False,
        callback=_check_env,
    ),
]
DeviceOption: TypeAlias = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Where transformers put the model; `auto` is a GPU if there is one.")
]
MirrorOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--mirror", metavar="DIR", help="With vLLM: the mirror that its workers read; by default one in ~/.cache/deltawire."),
]
PollOption: TypeAlias = Annotated[
    float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="How often to look for the next version, and for work.")
]
