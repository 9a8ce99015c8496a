"""`deltawire doctor URL`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..options.engine import check_engine_url
from ..output.figures import printable
from ..output.terminal import print_json, print_wrapped, result_console
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ..doctor.findings import Examination, Finding

_STYLES = {"ok": "green", "note": "", "warning": "yellow", "wrong": "red"}
_INDENT = 11
"""The columns before the text of a finding: the widest level, and two spaces on each side of it."""


def doctor(
    url: UrlArgument,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing. Without it, the command also notices if writing is not allowed.")
    ] = False,
    test_bytes: Annotated[
        int,
        typer.Option(
            "--test-bytes", min=0, max=1 << 30, metavar="N", help="Move this many bytes in each direction to measure bandwidth, or 0."
        ),
    ] = 8 << 20,
    relays: Annotated[bool, typer.Option("--relays", help="Also ask the stores of relays that are published in the run.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="URL",
            help="Also ask this vLLM server, such as http://127.0.0.1:8000.",
            show_default=False,
            callback=check_engine_url,
        ),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Find out why something does not work, and print what to do.

    The command checks access to the store, create if absent, the clock, latency and bandwidth, the newest commits, the files that a new
    reader needs, full checkpoints, garbage collection, signatures, members and readers that lag or are silent, relays, and the packages of
    this machine. It writes a few objects under probe/ and deletes them, unless --read-only is given.

    It ends with code 1 if something is wrong, and with code 0 if there are only warnings. `deltawire verify` checks the whole chain.
    """
    with exit_codes(json):
        from ..doctor.examine import examine

        with opened(url, verbose=verbose) as store:
            options = reader_options(run, trust)
            found = examine(store, url, options=options, read_only=read_only, test_bytes=test_bytes, relays=relays, engine=engine)
            if json:
                print_json(_as_json(store.url, found))
            else:
                _print(store.url, found)
        if not found.is_well:
            raise typer.Exit(1)


def _as_json(url: str, found: Examination) -> dict[str, Any]:
    findings = [{"check": one.check, "level": one.level, "what": one.what, "remedy": one.remedy or None} for one in found.findings]
    return {"url": url, "ok": found.is_well, "findings": findings, "measured": found.measured}


def _print(url: str, found: Examination) -> None:
    print_wrapped(result_console(), url, style="bold")
    for finding in found.findings:
        _print_finding(finding)
    print_wrapped(result_console(), _summary(found), style="bold")


def _print_finding(finding: Finding) -> None:
    console = result_console()
    start = f"  {finding.level:<{_INDENT - 2}}"
    first, *rest = _lines(f"{finding.check}: {finding.what}", console.width)
    console.print(Text.assemble((start, _STYLES[finding.level]), first), soft_wrap=True)
    for line in [*rest, *(_lines(f"What to do: {finding.remedy}", console.width) if finding.remedy else [])]:
        console.print(Text(" " * _INDENT + line), soft_wrap=True)


def _lines(text: str, width: int) -> list[str]:
    from ..output.figures import wrap_words

    return wrap_words(printable(text), max(20, width - _INDENT))


def _summary(found: Examination) -> str:
    counts = {level: sum(1 for finding in found.findings if finding.level == level) for level in ("wrong", "warning")}
    if not any(counts.values()):
        return "No check found a problem.\n`deltawire verify --deep` also reads all data."
    wrong = f"{counts['wrong']:,} thing{'s are' if counts['wrong'] != 1 else ' is'} wrong"
    warnings = f"{counts['warning']:,} warning{'s' if counts['warning'] != 1 else ''}"
    return ", ".join(text for text, number in ((wrong, counts["wrong"]), (warnings, counts["warning"])) if number) + "."
