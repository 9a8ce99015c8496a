"""`deltawire sidecar --engine URL --from URL`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..chain_options import PinOption, RunOption, TrustOption, VerboseOption, check_url, tell_if_verbose
from ..ending import Ending
from ..output import figures
from ..output.terminal import JsonOption, ThreadsOption, exit_codes, print_json_line, print_line, print_notice

_LONGEST_ENDING = 60.0
"""Seconds after a signal within which the command ends."""

if TYPE_CHECKING:
    from ...events import Event


class Pause(str, enum.Enum):
    keep = "keep"
    wait = "wait"
    abort = "abort"


class Cache(str, enum.Enum):
    drop = "drop"
    keep = "keep"


class Confirm(str, enum.Enum):
    written = "written"
    everything = "everything"


def sidecar(
    engine: Annotated[
        str, typer.Option("--engine", metavar="URL", help="The vLLM server, such as http://127.0.0.1:8000.", show_default=False)
    ],
    source: Annotated[
        str, typer.Option("--from", metavar="URL", help="Where the chain is, as for `follow`.", show_default=False, callback=check_url)
    ],
    mirror: Annotated[
        Path | None,
        typer.Option("--mirror", metavar="DIR", help="The mirror, which the server's workers read; by default one in ~/.cache/deltawire."),
    ] = None,
    pause: Annotated[
        Pause,
        typer.Option("--pause", help="Requests that are being answered at a swap go on after it, are finished before it, or end."),
    ] = Pause.keep,
    kv_cache: Annotated[
        Cache, typer.Option("--kv-cache", help="Keys and values of the old weights: computed anew with the new ones, or kept.")
    ] = Cache.drop,
    confirm: Annotated[
        Confirm, typer.Option("--confirm", help="What is read back from the server after each swap: what was written, or every tensor.")
    ] = Confirm.written,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What this engine calls itself in the store.", show_default=False)
    ] = None,
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="How often to look for the next version.")] = 0.5,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Keep a vLLM server at the newest version of a chain, without restarting it.

    The server runs with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "deltawire"}'`, on the same machine. A version
    is fetched and decoded while it generates; only writing the changed weights, and reading them back, happens in a pause. Sidecar and
    server may be restarted at any time. A server whose weights are in doubt stays paused until they have been loaded anew. Prints a line
    per swap; ends with Ctrl-C or SIGTERM, and then with code 0. With --json prints one JSON object per line.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending:
        from ...chain.reader_options import ReaderOptions
        from ...engines.base import KvCache
        from ...engines.vllm.sidecar import Sidecar, default_mirror

        driver = Sidecar(
            engine,
            source,
            mirror or default_mirror(source),
            pause=pause.value,
            kv_cache=KvCache(kv_cache.value),
            confirm=confirm.value,
            options=ReaderOptions(run=run, trusted_keys=trust or (), reader=name, pin=pin),
            threads=threads,
            on_event=ending.with_output(_print_as_json if json else _Listener(verbose)),
        )
        try:
            driver.run(poll=poll)
        except KeyboardInterrupt:
            return
        finally:
            driver.close()


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


class _Listener:
    """Prints a line per swap, and a notice for what goes wrong, once for as long as it does."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._told: str | None = None

    def __call__(self, event: Event) -> None:
        tell_if_verbose(event, self._verbose)
        fields = event.fields
        if event.name == "swapped":
            self._told = None
            parts = [
                f"version {fields['updates']}",
                "" if fields["step"] is None else f"step {fields['step']}",
                f"paused {1e3 * float(fields['pause_seconds'] or 0):.0f} ms",
                f"{figures.duration(float(fields['behind_seconds'] or 0))} after it was published",
                "loaded anew" if fields["loaded_anew"] else "",
            ]
            print_line("  ".join(filter(None, parts)))
        elif event.name == "engine-quarantined":
            self._tell(
                f"the update to version {fields['updates']} failed; the server stays paused while it is loaded anew: {fields['reason']}"
            )
        elif event.name == "attachments-changed":
            self._tell(f"restart the server to use these files, which changed: {fields['files']}")
        elif event.name == "repaired":
            self._tell(f"version {fields['updates']} was loaded anew")
        elif event.name in ("swap-failed", "sync-failed", "engine-lost", "report-failed"):
            self._tell(f"will try again: {fields['reason']}")

    def _tell(self, notice: str) -> None:
        if notice != self._told:
            self._told = notice
            print_notice(notice)
