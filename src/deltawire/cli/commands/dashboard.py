"""`deltawire dashboard --from URL`."""

from __future__ import annotations

import errno
import threading
import webbrowser
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import URL_HELP, RunOption, TrustOption, check_url, reader_options
from ..options.common import JsonLinesOption
from ..options.server import NamesOption, check_address
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes

if TYPE_CHECKING:
    from ...dashboard.observer import Observer
    from ...dashboard.server import DashboardServer

_PORT = 7700
_NOTICE_SECONDS = 0.5
_LONGEST_ENDING = 5.0
"""The command ends at most this many seconds after a signal, even while the store does not answer."""


def _server(observer: Observer, host: str, port: int | None, names: Collection[str]) -> DashboardServer:
    """Return a server at this port, or at the usual one. If the usual one is taken, return a server at a free port."""
    from ...dashboard.server import DashboardServer
    from ...errors import AddressUnavailable

    try:
        return DashboardServer(observer, host=host, port=_PORT if port is None else port, names=names)
    except AddressUnavailable as error:
        if port is not None or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        return DashboardServer(observer, host=host, names=names)


def dashboard(
    source: Annotated[str, typer.Option("--from", metavar="URL", help=URL_HELP, show_default=False, callback=check_url)],
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="PORT", help="Serve at this port. The default is 7700, or a free port.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Listen on this address. Everybody who reaches it can read the run.",
            callback=check_address,
        ),
    ] = "127.0.0.1",
    name: NamesOption = None,
    every: Annotated[float, typer.Option("--every", min=0.2, metavar="SECONDS", help="Look at the store this often.")] = 2.0,
    opened_in_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Show a run in a browser, live, until Ctrl-C.

    The page needs only the store, and never writes to it. It shows the chain, members, tasks, rewards, readers and faults, and the changes
    of each version. If the store does not answer, or holds no such run, the page and a notice say so, and the command tries again.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING):
        from ...dashboard.observer import Observer, ObserverOptions
        from ...store import StoreOptions

        reading = reader_options(run, trust, pin=False, store=StoreOptions(timeout=10.0, retries=1))
        with (
            suppress(KeyboardInterrupt),
            reading.open_store(source) as store,
            Observer(store, ObserverOptions(reading)) as observer,
            _server(observer, host, port, name or ()) as server,
        ):
            stop = threading.Event()
            threading.Thread(target=observer.follow, args=(stop, every), name="deltawire-look", daemon=True).start()
            threading.Thread(target=server.serve_forever, name="deltawire-serve", daemon=True).start()
            try:
                _tell(server, as_json=json)
                if opened_in_browser:
                    webbrowser.open(server.url)
                _tell_problems(observer, stop)
            finally:
                stop.set()
                server.close()


def _tell(server: DashboardServer, *, as_json: bool) -> None:
    if as_json:
        print_json_line({"event": "serving", "url": server.url})
    else:
        print_line(server.url)
    if not server.is_local:
        print_notice("everybody who can reach this machine can read the run; there is no password")


def _tell_problems(observer: Observer, stop: threading.Event) -> None:
    """Print why a look failed, once while it lasts, until Ctrl-C."""
    told: str | None = None
    while not stop.wait(_NOTICE_SECONDS):
        if (problem := observer.problem) != told and problem is not None:
            print_notice(f"will try again: {problem}")
        told = problem
