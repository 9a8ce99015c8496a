"""The option `--lora` of `deltawire sidecar`, `member` and `fleet`: LoRA adapters that the server gets from chains of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from .chain import check_url

if TYPE_CHECKING:
    from ...chain.reader_options import ReaderOptions
    from ...engines.vllm.driver.lora_follower import LoraFollower
    from ...events import OnEvent

_LORA = "Also load each version N of the LoRA adapter in the chain at URL, as NAME-vN. Repeat it for several adapters."

LoraOption: TypeAlias = Annotated[list[str] | None, typer.Option("--lora", metavar="NAME=URL", help=_LORA, show_default=False)]
MemberLoraOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=URL", help=f"With vLLM: {_LORA[0].lower()}{_LORA[1:]}", show_default=False),
]


def read_adapters(given: Sequence[str] | None) -> dict[str, str]:
    """Return the chain of each adapter. Anything that is not NAME=URL, or the same name twice, is wrong usage."""
    found: dict[str, str] = {}
    for each in given or ():
        name, separator, url = each.partition("=")
        if not (name and separator and url):
            raise typer.BadParameter(f"{each!r} is not of the form NAME=URL.", param_hint="--lora")
        if name in found:
            raise typer.BadParameter(f"the adapter {name!r} is given twice.", param_hint="--lora")
        found[name] = check_url(url)
    return found


def read_member_adapters(given: Sequence[str] | None, engine: str) -> tuple[tuple[str, str], ...]:
    """Return the name and the chain of each adapter of a member's server. Adapters without a server are wrong usage.

    Parameters
    ----------
    given
        What the user gave.
    engine
        The member's engine.
    """
    found = tuple(read_adapters(given).items())
    if found and engine == "transformers":
        raise typer.BadParameter("only vLLM servers get LoRA adapters. Name one with --engine vllm=URL.", param_hint="--lora")
    return found


def start_followers(
    adapters: Mapping[str, str], engine: str, spool: Path | None, options: ReaderOptions, on_event: OnEvent
) -> list[LoraFollower]:
    """Return a follower for each adapter.

    Parameters
    ----------
    adapters
        The chain of each adapter.
    engine
        The URL of the server.
    spool
        The directory for adapters. None means the usual one.
    options
        Which chains to accept, and how to read them.
    on_event
        Called with each event.
    """
    from ...engines.vllm.driver.lora_follower import LoraFollower, adapter_folder

    folder = None if spool is None else adapter_folder(spool, engine)
    return [LoraFollower(engine, name, url, folder, options=options, on_event=on_event) for name, url in adapters.items()]


def with_adapters(base: tuple[bool, Mapping[str, Any]], followers: Sequence[LoraFollower]) -> tuple[bool, Mapping[str, Any]]:
    """Return whether a server is ready, and what /ready answers, with its adapters. Each adapter must have a version.

    Parameters
    ----------
    base
        The same for its own weights.
    followers
        The adapters.
    """
    is_ready, told = base
    missing = [each for each in followers if each.current is None]
    if is_ready and missing:
        return False, {"reason": missing[0].problem or f"the LoRA adapter {missing[0].name!r} has no version yet."}
    return is_ready, {**told, "adapters": {each.name: each.current for each in followers}} if followers else told
