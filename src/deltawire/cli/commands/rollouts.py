"""`deltawire rollouts URL`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..options.member import check_member_name
from ..output import figures
from ..output.completion_text import open_decoder, tokens_as_text
from ..output.terminal import print_json, print_notice, print_wrapped, result_console
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from rich.console import Console

    from ...fleet.overview import FleetReader, SeenResult
    from ...format.rollouts import Completion, Rollouts
    from ..output.completion_text import Decode

_SHORT = 8
"""The number of lines of a text that are shown without --full."""


def rollouts(
    url: UrlArgument,
    count: Annotated[int, typer.Option("-n", "--count", min=1, metavar="N", help="Show this many completions.")] = 10,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="Show only completions for this training step.", show_default=False)
    ] = None,
    member: Annotated[
        str | None,
        typer.Option(
            "--member", metavar="NAME", help="Show only completions of this member.", show_default=False, callback=check_member_name
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help=f"Show whole texts, not only their first {_SHORT} lines.")] = False,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Show completions that members made, with their rewards, newest first.

    Each completion comes with the training steps of the versions that made it. The texts need the tokenizer that is published with the
    weights; without it the command shows token ids. The trainer acknowledged "accepted" completions and left out "rejected" ones; it has
    not decided about "uploaded" ones. Old rounds are deleted from the store.
    """
    with exit_codes(json):
        from ...fleet.overview import FleetReader

        with opened(url, verbose=verbose) as store:
            options = reader_options(run, trust)
            its_run = options.open_log(store).run
            decode, why = open_decoder(store, options)
            if decode is None:
                print_notice(f"showing token ids: {why}")
            with FleetReader(store, its_run.id, trusted_keys=trust or ()) as reader:
                chosen = list(_chosen(reader, count, step, member))
            if json:
                print_json(
                    {"url": store.url, "run": its_run.run, "id": its_run.id, "rollouts": [_as_json(*each, decode) for each in chosen]}
                )
                return
            console = result_console()
            if not chosen:
                print_wrapped(console, "the store holds no such completions")
            before: tuple[object, int] | None = None
            for result, made, one in chosen:
                if before is None or before[0] is not made:
                    _print_heading(console, result, made)
                if before != (made, one.prompt):
                    _print_text(console, "prompt", made.prompts[one.prompt].tolist(), decode, full=full)
                before = made, one.prompt
                _print_text(console, _facts(made, one), one.tokens.tolist(), decode, full=full)


def _chosen(reader: FleetReader, count: int, step: int | None, member: str | None) -> Iterator[tuple[SeenResult, Rollouts, Completion]]:
    """Yield at most `count` completions. Results that cannot be read are counted in a notice, and left out."""
    left, unreadable = count, 0
    for result in reader.results(step=step):
        made = reader.read(result)
        if made is None:
            unreadable += 1
            continue
        if member is not None and made.member != member:
            continue
        for one in made.completions[:left]:
            yield result, made, one
        left -= len(made.completions)
        if left <= 0:
            break
    if unreadable:
        print_notice(f"{unreadable:,} result{'s' if unreadable > 1 else ''} could not be read")


def _as_json(result: SeenResult, made: Rollouts, one: Completion, decode: Decode | None) -> dict[str, Any]:
    prompt, tokens = made.prompts[one.prompt].tolist(), one.tokens.tolist()
    return {
        "step": result.round.for_step,
        "round": made.round,
        "task": made.task,
        "attempt": made.attempt,
        "member": made.member,
        "state": result.state,
        "why": result.why,
        "uploaded": result.modified,
        "versions": [{"seq": seq, "step": made.versions[seq].step} for seq in sorted({span.seq for span in one.spans})],
        "rewards": dict(zip(made.reward_names, one.rewards, strict=True)),
        "finished": one.finished,
        "routing": _routing_as_json(made),
        "prompt_tokens": prompt,
        "tokens": tokens,
        "prompt": None if decode is None else decode(prompt),
        "completion": None if decode is None else decode(tokens),
    }


def _routing_as_json(made: Rollouts) -> dict[str, Any] | None:
    """Return facts about the routed experts of a whole result, or None if it has none."""
    if made.routing is None:
        return None
    layout, tokens = made.routing.layout, len(made.routing.sequences.tokens)
    return {
        "experts": layout.experts,
        "top_k": layout.top_k,
        "layers": list(layout.layers),
        "broken_rows": made.routing.broken,
        "bytes": made.routing.nbytes,
        "bytes_per_token": round(made.routing.nbytes / tokens, 2),
    }


def _print_heading(console: Console, result: SeenResult, made: Rollouts) -> None:
    steps = sorted({version.step for version in made.versions.values()})
    by = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    parts = [f"for step {result.round.for_step}", f"round {made.round} task {made.task}", f"by {made.member} with {by}", result.state]
    if made.routing is not None:
        parts.insert(-1, f"routing {made.routing.nbytes / len(made.routing.sequences.tokens):,.1f} bytes/token")
    print_wrapped(console, "  ".join(parts) + (f": {result.why}" if result.why else ""), style="bold", indent=2)


def _facts(made: Rollouts, one: Completion) -> str:
    named = zip(made.reward_names, one.rewards, strict=True)
    rewards = [f"{name} {'–' if reward is None else f'{reward:.4g}'}" for name, reward in named]
    length = f"{len(one.tokens):,} token{'s' if len(one.tokens) != 1 else ''}{'' if one.finished else ', cut off'}"
    return "  ".join([*rewards, length])


def _print_text(console: Console, title: str, tokens: list[int], decode: Decode | None, *, full: bool) -> None:
    print_wrapped(console, f"  {title}", style="dim", indent=4)
    text = tokens_as_text(tokens) if decode is None else decode(tokens)
    lines = [part for line in text.splitlines() for part in figures.wrap_words(figures.printable(line), console.width - 4)]
    shown = lines if full else lines[:_SHORT]
    for line in shown:
        console.print(Text(f"    {line}"), soft_wrap=True)  # Text, so that the completion is not read as markup
    if len(shown) < len(lines):
        more = len(lines) - len(shown)
        console.print(Text(f"    … {more:,} more line{'s' if more > 1 else ''}: --full shows them", style="dim"), soft_wrap=True)
