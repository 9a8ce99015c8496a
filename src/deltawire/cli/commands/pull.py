"""`deltawire pull URL DIR`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import (
    FromOption,
    HostCacheOption,
    PinOption,
    RelaysOption,
    RunOption,
    StepOption,
    TrustOption,
    UrlArgument,
    find_seq,
    reader_options,
    refuse_several,
)
from ..options.channels import ChannelOption
from ..options.common import ForceOption, JsonOption, ThreadsOption, VerboseOption
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.event_notices import print_if_not_shared, print_if_verbose, print_if_waiting
from ..output.progress import progress_bar
from ..output.terminal import print_json, print_rows
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...chain.channels import ChannelReader
    from ...chain.log import ChainLog
    from ...chain.version import Version
    from ...events import Event

_LONGEST_ENDING = 30.0
"""The command ends at most this many seconds after a signal, even if a transfer waits for its store or for --max-rate."""


def pull(
    url: UrlArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Write the checkpoint to this directory.", show_default=False)],
    at: Annotated[
        int | None, typer.Option("--at", min=1, metavar="VERSION", help="Take this version instead of the newest.", show_default=False)
    ] = None,
    step: StepOption = None,
    channel: ChannelOption = None,
    force: ForceOption = False,
    copies: FromOption = None,
    relays: RelaysOption = False,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be fetched, and write nothing.")] = False,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    host_cache: HostCacheOption = "off",
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Fetch one version of a chain as a checkpoint directory.

    The checkpoint is exactly the one that was published, in the same files, and any library that reads safetensors can load it. DIR appears
    only when it is complete and checked. --force replaces a checkpoint in DIR, but never a directory that also holds other files. To keep a
    directory up to date, use `follow`.
    """
    refuse_several(at=at, step=step, channel=channel)
    with exit_codes(json), Ending(_LONGEST_ENDING):
        from ...subscribe.pull import pull as pull_version

        started = time.perf_counter()
        planned: dict[str, Any] = {}
        reported: set[str] = set()
        limits = store_options(max_rate, max_requests)
        options = reader_options(run, trust, pin=pin, store=limits, host_cache=host_cache, relays=relays, channel=channel)
        with (
            opened(url, copies=copies, reading=options, verbose=verbose) as store,
            progress_bar(f"pull {directory.name}", None, quiet=json or verbose) as progress,
        ):

            def on_event(event: Event) -> None:
                print_if_verbose(event, verbose)
                if event.name == "planned":
                    planned.update(event.fields)
                    progress.expect(planned["bytes"])
                elif not json:
                    print_if_waiting(event, reported)
                    print_if_not_shared(event, reported)

            chain = options.open_log(store)
            seq = find_seq(chain, at, step)
            if dry_run:
                plan = plan_pull(chain, directory, seq, replace=force, channel=options.open_channel(chain))
                progress.close()
                _report_plan(store.url, directory, plan, json)
                return
            version = pull_version(
                store,
                directory,
                seq=seq,
                replace=force,
                options=options,
                threads=threads,
                progress=progress,
                on_event=on_event,
            )
        seconds = time.perf_counter() - started
        if json:
            print_json(_as_json(store.url, directory, version, planned, seconds))
        else:
            print_rows(str(directory), _rows(version, planned, seconds))


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The version that a pull would fetch, its size, and the files that it would write."""

    version: Version
    bytes: int
    hops: int
    files: list[str]


def plan_pull(chain: ChainLog, directory: Path, seq: int | None, *, replace: bool, channel: ChannelReader | None = None) -> PullPlan:
    """Find the route to a version, and check that the directory could be written. Fetches no data, and writes nothing."""
    from ...chain.routes.remaining_routes import Routes
    from ...chain.routes.restore import fetched_hops
    from ...chain.version import Version
    from ...format.checkpoints.shard_layout import LAYOUT_FILE
    from ...format.checkpoints.staged_output import refuse_losses, refuse_output
    from ...subscribe.chain_view import ChainView

    refuse_output(directory, directory=True, replace=replace)
    view = ChainView(chain, channel=channel)
    target = view.target() if seq is None else view.version_at(view.head(), seq)
    hops = Routes(chain).find(None, target)
    attachments = target.attachments or ()
    size = sum(entry.size for hop in hops for entry in hop.files) + sum(entry.size for entry in attachments)
    names = {entry.name for entry in (*hops[0].files, *attachments) if entry.name is not None}
    refuse_losses(directory, names)
    return PullPlan(Version.of(target), size, fetched_hops(hops), sorted(names - {LAYOUT_FILE}))


def _report_plan(url: str, directory: Path, plan: PullPlan, json: bool) -> None:
    version = plan.version
    if json:
        facts = {"version": version.updates, "seq": version.seq, "step": version.step, "weight_bytes": version.state_bytes}
        print_json(
            {"url": url, "out": str(directory), "dry_run": True, **facts, "bytes": plan.bytes, "hops": plan.hops, "files": plan.files}
        )
        return
    print_rows(
        f"{directory} would be written, nothing was fetched",
        [
            ("version", f"{version.updates}" + ("" if version.step is None else f", step {version.step:,}")),
            ("weights", figures.size(version.state_bytes)),
            ("to be fetched", _fetched(plan.bytes, plan.hops)),
            ("files", ", ".join(plan.files)),
        ],
    )


def _as_json(url: str, directory: Path, version: Version, planned: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "url": url,
        "out": str(directory),
        "version": version.updates,
        "seq": version.seq,
        "step": version.step,
        "digest": version.digest.hex(),
        "meta": dict(version.meta),
        "weight_bytes": version.state_bytes,
        "bytes": planned["bytes"],
        "hops": planned["hops"],
        "seconds": seconds,
    }


def _fetched(size: int, hops: int) -> str:
    """Describe the fetched data. A route from nothing has a full checkpoint, and then deltas."""
    deltas = "" if hops < 2 else " and one delta" if hops == 2 else f" and {hops - 1:,} deltas"
    return f"{figures.size(size)}: a full checkpoint{deltas}"


def _rows(version: Version, planned: dict[str, Any], seconds: float) -> list[tuple[str, str]]:
    return [
        ("version", f"{version.updates}" + ("" if version.step is None else f", step {version.step:,}")),
        ("weights", figures.size(version.state_bytes)),
        ("fetched", _fetched(planned["bytes"], planned["hops"])),
        ("time", f"{seconds:.2f} s"),
        ("digest", f"{version.digest.hex()}, checked"),
    ]
