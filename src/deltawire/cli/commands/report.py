"""`deltawire report URL -o FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..output import figures
from ..output.terminal import print_json, print_line
from ..process.exit_codes import exit_codes
from ..stores.opened import opened


def report(
    url: UrlArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Write the page to this file, and replace it if it exists.")
    ] = Path("run.html"),
    details: Annotated[
        int,
        typer.Option("--details", min=0, max=1000, metavar="N", help="Include what the newest N versions change. Their files are read."),
    ] = 8,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Write the page of `deltawire dashboard`, as it is now, to one HTML file.

    The file needs no server and no network. It shows what the store holds: the history of members is only that of the tasks which the
    trainer has not deleted yet.
    """
    with exit_codes(json):
        from ...dashboard import Observer, ObserverOptions, write_report

        reading = reader_options(run, trust, pin=False)
        with opened(url, verbose=verbose, reading=reading) as store, Observer(store, ObserverOptions(reading)) as observer:
            observer.look(raising=True)
            size = write_report(observer, output, details=details)
            if json:
                print_json({"report": str(output), "bytes": size, "read_bytes": observer.read_bytes, "requests": observer.requests})
            else:
                print_line(f"{output}  {figures.size(size)}")
