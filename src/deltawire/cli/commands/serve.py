"""`deltawire serve --from URL`."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import URL_HELP, RunOption, TrustOption, check_url, reader_options
from ..options.channels import ChannelOption
from ..options.common import JsonLinesOption
from ..options.member import DeviceOption
from ..options.server import HostOption, PortOption, check_packages
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..process.leaving import leaving_on_signals
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...chain.reader_options import ReaderOptions
    from ...events import Event

_LONGEST_ENDING = 30.0


def serve(
    source: Annotated[str, typer.Option("--from", metavar="URL", help=URL_HELP, show_default=False, callback=check_url)],
    channel: ChannelOption = None,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Call the model NAME.")] = "policy",
    device: DeviceOption = "auto",
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look for a new version this often.")] = 0.5,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Serve the model of a chain with OpenAI's routes, for small models and demos.

    The model runs in this process with transformers, and follows the chain or a channel while it answers. Use vLLM for large models.
    """
    with exit_codes(json, one_line=True), ExitStack() as stack:
        check_packages("serve", ("torch", "transformers", "uvicorn"), "torch transformers uvicorn httptools")
        from ...addresses import listening_socket

        # The port and the chain are tried before the imports, which take up to a minute.
        listening = stack.enter_context(listening_socket("the model", host, port))
        reading = reader_options(run, trust, pin=False, channel=channel)
        stop = threading.Event()
        with leaving_on_signals(stop):
            _await_chain(source, reading, channel, poll, stop)
        if stop.is_set():
            return
        from ...rl.member import pick_device
        from ...rl.serving.openai_server import serve_openai

        def tell(address: str) -> None:
            if json:
                print_json_line({"event": "serving", "url": address})
            else:
                print_line(address)

        def notice(event: Event) -> None:
            if json:
                print_json_line(event.to_json())
            elif event.name in ("sync-failed", "swap-failed", "engine-quarantined", "follow-failed"):
                print_notice(str(event.fields.get("reason")))

        with leaving_on_signals(stop), Ending(_LONGEST_ENDING) as ending:
            serve_openai(
                source,
                host=host,
                port=port,
                name=model,
                device=pick_device(device),
                reading=reading,
                poll=poll,
                stop=stop,
                on_ready=tell,
                on_event=ending.with_output(notice),
                listening=listening,
            )


def _await_chain(source: str, reading: ReaderOptions, channel: str | None, poll: float, stop: threading.Event) -> None:
    """Open the chain, and wait until the channel exists or `stop` is set. A notice names the channels that exist."""
    from ...chain.channels import ChannelReader
    from ...errors import NoChannel

    with opened(source) as store:
        log = reading.open_log(store)
        log.run  # noqa: B018 - read now, so that a chain that does not exist is an error before the imports
        if channel is None:
            return
        reader, told = ChannelReader(log, channel), False
        while not stop.is_set():
            try:
                reader.newest()
                return
            except NoChannel as error:
                if not told:
                    print_notice(f"will wait: {error}")
                told = True
            stop.wait(poll)
