"""`deltawire gate URL`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, load_signing_key, reader_options
from ..options.common import JsonLinesOption, VerboseOption
from ..options.metrics import MetricsOption, counted
from ..output.event_notices import print_if_verbose
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...events import Event
    from ...live.gate import Gate, GateLook
    from ...live.gate_rules import GatePolicy, Range

_LONGEST_ENDING = 30.0
_WHILE_EVALUATING = 0.5
"""Seconds between two looks of `--once` while an evaluation runs."""


def gate(
    url: UrlArgument,
    canary: Annotated[str, typer.Option("--from", metavar="CHANNEL", help="The channel whose version is judged.")] = "canary",
    stable: Annotated[
        str, typer.Option("--to", metavar="CHANNEL", help="The channel to compare with, which gets the version if it is good enough.")
    ] = "stable",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="LIMIT",
            help="A limit that must be proved before the version is promoted: NAME (better than CHANNEL), NAME:-0.01 (at most 0.01 worse), "
            "NAME:-2%, or NAME:+0 if less is better. May be given several times.",
            show_default=False,
        ),
    ] = None,
    monitor: Annotated[
        list[str] | None,
        typer.Option(
            "--monitor",
            metavar="LIMIT",
            help="A limit that leads to a rollback if it is broken, and need not be proved: length:+20%, refusal:+0.02, "
            "bad_tool_calls:+0.01, or one of any metric. A promotion then needs --min-answers. May be given several times.",
            show_default=False,
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="CMD",
            help="A shell command that must exit with 0 before the version is promoted. It gets DELTAWIRE_URL, DELTAWIRE_VERSION, "
            "DELTAWIRE_SEQ, DELTAWIRE_STEP, DELTAWIRE_DIGEST, DELTAWIRE_STABLE_VERSION and DELTAWIRE_STABLE_SEQ, and may print scores as a "
            "line of JSON. Code 75 means: try again.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            "--score",
            metavar="NAME:VALUE",
            help="The smallest value that a score may have. --evaluate prints the scores.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Stop --evaluate if it takes longer than this.")
    ] = 3600.0,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, metavar="N", help="Start --evaluate at most this many times if it does not finish.")
    ] = 3,
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="P", help="The largest allowed probability of a wrong promotion, and of a wrong rollback.")
    ] = 0.05,
    min_answers: Annotated[
        int,
        typer.Option(
            "--min-answers",
            min=1,
            metavar="N",
            help="With --metric or --monitor: judge nothing before the canary has given this many answers, and promote nothing before "
            "each limit has as many of each channel.",
        ),
    ] = 100,
    min_seconds: Annotated[
        float,
        typer.Option(
            "--min-seconds", min=0.0, metavar="SECONDS", help="Promote no version that has been on its channel for less time than this."
        ),
    ] = 0.0,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=0.0, metavar="SECONDS", help="Roll back if there is no decision after this time.")
    ] = 86400.0,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0.0,
            metavar="SECONDS",
            help="Count an answer when it is this old, with the feedback that it has then, instead of at the end of each metric's window.",
            show_default=False,
        ),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="NAME=LOW:HIGH",
            help="The range of a metric, or of `length` (by default 0:2048). Values outside it count as its nearer end. A narrow range "
            "needs fewer answers.",
            show_default=False,
        ),
    ] = None,
    by_user: Annotated[bool, typer.Option("--by-user", help="Count only the first answer of each user.")] = False,
    retention: Annotated[
        float,
        typer.Option(
            "--retention", min=1.0, metavar="SECONDS", help="Delete evidence about earlier versions of CHANNEL that is older than this."
        ),
    ] = 30 * 86400.0,
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look this often.")] = 10.0,
    wait_for_channels: Annotated[
        bool, typer.Option("--wait-for-channels", help="Wait for channels that do not exist yet. Otherwise they are an error.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end. If the evaluation is missing, run it first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the decision: write no evidence, run no evaluation, and move no channel.")
    ] = False,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="KEYFILE", help="Sign moves and evidence with this key, which `keygen` made.", show_default=False),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    metrics: MetricsOption = None,
    verbose: VerboseOption = False,
    json: JsonLinesOption = False,
) -> None:
    """Promote a canary that is good enough, and roll back one that is not.

    The gate compares answers and feedback of users who get the canary with those of everybody else. Its test may look at any time: the
    probability of a wrong decision stays below --alpha. It writes its evidence to the store first, and then moves the channel.

    The command prints a line for each decision, and then watches the next canary. It may be killed at any time, and several gates may run.
    Ctrl-C and SIGTERM end it.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending, ExitStack() as stack:
        from ...live.declared_metrics import declared_metrics
        from ...live.gate import Gate, GateOptions
        from ...live.gate_rules import parse_score
        from ..process.evaluation_command import EvaluationCommand

        least = dict(parse_score(text) for text in score or ())
        if least and evaluate is None:
            raise typer.BadParameter("--score needs --evaluate.")
        policy = _policy(metric, monitor, evaluate, alpha, min_answers, min_seconds, max_seconds, attempts)
        options = GateOptions(canary, stable, _ranges(ranges), wait, by_user, dry_run, retention)
        key = None if sign is None else load_signing_key(sign)
        store = stack.enter_context(opened(url, verbose=verbose))
        chain = reader_options(run, trust).open_log(store)
        chain.trust_first_key()
        on_event = stack.enter_context(counted(metrics, ending.with_output(_Listener(json, verbose=verbose))))
        evaluator = None if evaluate is None else EvaluationCommand(evaluate, url, timeout=timeout, least=least)
        judge = Gate(chain, policy, lambda: declared_metrics(chain), options=options, evaluator=evaluator, key=key, on_event=on_event)
        stack.callback(judge.close)
        if once or dry_run:
            _look_once(judge, json, waits=wait_for_channels)
        else:
            _watch(judge, poll, waits=wait_for_channels)


def _policy(
    metric: list[str] | None,
    monitor: list[str] | None,
    evaluate: str | None,
    alpha: float,
    min_answers: int,
    min_seconds: float,
    max_seconds: float,
    attempts: int,
) -> GatePolicy:
    from ...live.gate_rules import GatePolicy, Limit

    limits = [Limit.parse(text, must_hold=True) for text in metric or ()] + [Limit.parse(text, must_hold=False) for text in monitor or ()]
    return GatePolicy(tuple(limits), alpha, min_answers, min_seconds, max_seconds, evaluate is not None, attempts)


def _ranges(texts: list[str] | None) -> dict[str, Range]:
    from ...live.gate_rules import Range

    found = {}
    for text in texts or ():
        name, _, ends = text.rpartition("=")
        low, _, high = ends.partition(":")
        try:
            found[name] = Range(float(low), float(high))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a range. Write NAME=LOW:HIGH, such as length=0:512.", param_hint="--range") from None
    return found


def _check_channels(look: GateLook, *, waits: bool) -> None:
    """Raise `NoChannel` if a channel does not exist, unless the gate waits for it."""
    from ...errors import NoChannel

    if look.missing is not None and not waits:
        raise NoChannel(look.missing, hint="Check the names, or wait for the channels with --wait-for-channels.")


def _check_first(judge: Gate, look: GateLook, *, waits: bool) -> None:
    """Check the names of channels and metrics at the first look, although there may be no canary yet for which they are needed."""
    _check_channels(look, waits=waits)
    if look.state == "idle":
        judge.check_limits()


def _look_once(judge: Gate, as_json: bool, *, waits: bool) -> None:
    look = judge.look()
    _check_first(judge, look, waits=waits)
    while look.is_evaluating:
        time.sleep(_WHILE_EVALUATING)
        look = judge.look()
    if as_json:
        print_json_line(_as_json(look))
    elif look.record is None:
        print_line("there is no canary" if look.missing is None else f"will wait: {look.missing}")
    else:
        print_line(look.stale or f"{look.record.outcome}: {look.record.why}")


def _watch(judge: Gate, poll: float, *, waits: bool) -> None:
    from ...errors import DeltawireError

    told: str | None = None
    checked = False
    while True:
        try:
            look = judge.look()
            if not checked:
                _check_first(judge, look, waits=waits)
                checked = look.state != "waiting"
        except DeltawireError as error:
            if not error.retryable:
                raise
            print_notice(f"will try again: {error}")
        else:
            _check_channels(look, waits=waits)
            notice = look.stale if look.missing is None else f"will wait: {look.missing}"
            if notice is not None and notice != told:
                print_notice(notice)
            told = notice
        time.sleep(poll)


def _as_json(look: GateLook) -> dict[str, Any]:
    moved = look.moved and {"channel": look.moved.channel, "move": look.moved.move, "kind": look.moved.kind}
    return {"event": "gate", "state": look.state, "record": look.record and look.record.plain(), "moved": moved, "stale": look.stale}


class _Listener:
    """Prints decisions as lines, or all events as JSON lines."""

    def __init__(self, as_json: bool, *, verbose: bool) -> None:
        self._json = as_json
        self._verbose = verbose

    def __call__(self, event: Event) -> None:
        print_if_verbose(event, self._verbose)
        fields = event.fields
        if self._json:
            print_json_line(event.to_json())
        elif event.name == "gate-decided":
            print_line(f"{fields['outcome']} commit {fields['seq']}  {fields['why']}")
        elif event.name == "gate-evaluated":
            print_line(f"evaluated  {fields['why']}")
        elif event.name == "live-file-refused":
            print_notice(f"{fields['key']} does not count: {fields['why']}")
