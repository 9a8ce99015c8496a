"""`deltawire gateway --from URL --engine [CHANNEL=]URL`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import URL_HELP, RunOption, TrustOption, check_url, reader_options
from ..options.common import JsonLinesOption
from ..options.server import HostOption, NamesOption, PortOption, check_packages
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..process.leaving import leaving_on_signals

if TYPE_CHECKING:
    from ...events import Event

_PORT = 7800
_LONGEST_ENDING = 45.0
_NOTICES = {
    "gateway-name-used": "another gateway that runs has the same --gateway name and --journal (session {session}): give it another name",
    "caller-without-answers": "the caller {caller} can rate nothing, because all its keys are for feedback without `all`: give it a key "
    "without `feedback` too",
    "engine-away": "the engine {engine} does not answer: {reason}",
    "engine-back": "the engine {engine} answers{commit}",
    "recording-waits": "interactions stay in the journal: {reason}",
    "recording-stopped": "answers are no longer recorded: {reason}",
    "recording-resumed": "answers are recorded again",
    "interaction-unusable": "an answer cannot be recorded: {reason}",
    "interaction-untrained": "an answer must not be trained on: {reason}",
    "metric-undeclared": "the metric {metric!r} is not declared, so no trainer reads feedback for it",
    "feedback-waits": "feedback waits for the store: {reason}",
    "journal-recovered": "everything that session {session} left in the journal is in the store",
    "channel-unreadable": "a channel cannot be read: {reason}",
    "answer-failed": "an answer broke off: {reason}",
}


def check_engines(given: list[str]) -> list[str]:
    """Return the engines. A text that is not [CHANNEL=]URL is wrong usage."""
    from ...gateway.options import EngineAddress

    for each in given:
        try:
            EngineAddress.parse(each)
        except ValueError as error:
            raise typer.BadParameter(f"{error}. Write [CHANNEL=]URL, such as canary=http://127.0.0.1:8000.") from None
    return given


def check_origins(given: list[str] | None) -> list[str]:
    """Return the origins. A text that is not an origin is wrong usage."""
    from ...gateway.http.origins import check_origin

    try:
        return [check_origin(each) for each in given or ()]
    except ValueError as error:
        raise typer.BadParameter(f"{error}. Write SCHEME://HOST or SCHEME://HOST:PORT, such as https://app.example.") from None


def gateway(
    source: Annotated[str, typer.Option("--from", metavar="URL", help=URL_HELP, show_default=False, callback=check_url)],
    engine: Annotated[
        list[str],
        typer.Option(
            "--engine",
            metavar="[CHANNEL=]URL",
            help="Answer with this server, which follows the channel or the chain. May be repeated. Users who "
            "belong to no other channel get the channel of the first engine.",
            show_default=False,
            callback=check_engines,
        ),
    ],
    port: PortOption = _PORT,
    host: HostOption = "127.0.0.1",
    name: NamesOption = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            "--origin",
            metavar="ORIGIN",
            help="Let pages of this origin, such as https://app.example, use the gateway from a browser. May be repeated.",
            show_default=False,
            callback=check_origins,
        ),
    ] = None,
    gateway_name: Annotated[
        str, typer.Option("--gateway", metavar="NAME", help="Record as the gateway NAME. No other gateway may have the name.")
    ] = "gateway",
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            metavar="DIR",
            help="Keep here what the store does not have yet. The default is ~/.local/state/deltawire/gateway.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="Accept only callers with an API key of this file (docs/live.md).", show_default=False),
    ] = None,
    user_key: Annotated[
        Path | None,
        typer.Option(
            "--user-key",
            metavar="FILE",
            help="Hash the names of users with this secret. By default, the gateway draws one, and keeps it in the journal.",
            show_default=False,
        ),
    ] = None,
    engine_key: Annotated[
        str | None,
        typer.Option(
            "--engine-key", envvar="DELTAWIRE_ENGINE_KEY", metavar="KEY", help="Send this API key to the engines.", show_default=False
        ),
    ] = None,
    record: Annotated[float, typer.Option("--record", min=0.0, max=1.0, metavar="SHARE", help="Record this part of the answers.")] = 1.0,
    consent: Annotated[
        bool, typer.Option("--consent/--no-consent", help="Allow training on answers whose request does not say x-deltawire-consent.")
    ] = True,
    text: Annotated[bool, typer.Option("--text", help="Record the text of conversations, too.")] = False,
    redact: Annotated[
        str | None,
        typer.Option(
            "--redact", metavar="MODULE:FUNCTION", help="Ask this function what may be recorded (docs/live.md).", show_default=False
        ),
    ] = None,
    strict_metrics: Annotated[
        bool, typer.Option("--strict-metrics", help="Refuse feedback for metrics that the trainer has not declared.")
    ] = False,
    patience: Annotated[float, typer.Option("--patience", min=0.1, metavar="SECONDS", help="Wait this long for an engine.")] = 300.0,
    most_bytes: Annotated[int, typer.Option("--most-bytes", min=1024, metavar="N", help="Refuse requests with more bytes than this.")] = 32
    << 20,
    memory_bytes: Annotated[
        int,
        typer.Option(
            "--memory-bytes",
            min=1 << 20,
            metavar="N",
            help="Refuse requests that would make all requests together take more memory than this.",
        ),
    ] = 1 << 30,
    requests_per_caller: Annotated[
        int,
        typer.Option(
            "--requests-per-caller", min=1, metavar="N", help="Refuse requests of a caller of --keys who has this many, of 2,048 of all."
        ),
    ] = 1024,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Answer OpenAI-compatible requests with engines that follow a chain, and record the answers in the store.

    Each answer has an id, by which feedback can be sent later: POST /feedback. Everything that training needs is recorded with the
    answers: token ids, log-probs, and the version of every token. Engines may swap weights, restart and come back; requests wait for them.
    The gateway also answers GET /metrics for Prometheus, and GET /healthz.

    Ctrl-C and SIGTERM let it finish what it has begun. If it is killed, its next start stores what it had recorded.
    """
    with exit_codes(json, one_line=True):
        check_packages("the gateway", ("aiohttp", "fastapi", "uvicorn"), "aiohttp fastapi uvicorn httptools")
        from ...gateway import GatewayOptions, serve_gateway
        from ...gateway.options import EngineAddress

        sys.path.insert(0, os.getcwd())  # the module of the function is usually here, as with `python -m`
        given: dict[str, Any] = {} if journal is None else {"journal": journal}
        try:
            options = GatewayOptions(
                [EngineAddress.parse(each) for each in engine],
                name=gateway_name,
                keys=keys,
                user_key=None if user_key is None else user_key.read_bytes(),
                engine_key=engine_key,
                share=record,
                consent=consent,
                text=text,
                redact=_load(redact),
                names=tuple(name or ()),
                origins=tuple(origin or ()),
                strict_metrics=strict_metrics,
                patience=patience,
                most_bytes=most_bytes,
                memory_bytes=memory_bytes,
                requests_per_caller=requests_per_caller,
                **given,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        stop = threading.Event()
        with leaving_on_signals(stop), Ending(_LONGEST_ENDING) as ending:
            serve_gateway(
                source,
                options,
                host=host,
                port=port,
                reading=reader_options(run, trust, pin=False),
                stop=stop,
                on_event=ending.with_output(_print_as_json if json else _Notices(host)),
            )


def _load(spec: str | None) -> Any:
    if spec is None:
        return None
    from ...errors import UnusableReward
    from ...rl.rewards import load_reward

    try:
        return load_reward(spec, what="redaction function")
    except UnusableReward as error:
        raise typer.BadParameter(error.message) from None


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


class _Notices:
    """Prints the address of the gateway, and a line for each change that people should know. A line is not repeated."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._last: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        if event.name == "gateway-serving":
            print_line(str(event.fields["url"]))
            if not self._host.startswith("127.") and self._host != "::1":
                print_notice("everybody who can reach this machine can use the gateway, unless --keys is given")
        elif (form := _NOTICES.get(event.name)) is not None:
            seq = event.fields.get("seq")
            line = form.format(**event.fields, commit="" if seq is None else f", with commit {seq}")
            if self._last.get(event.name) != line:
                self._last[event.name] = line
                print_notice(line)
