"""`deltawire plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import RunOption, TrustOption, check_url, reader_options
from ..options.common import ForceOption, JsonOption
from ..output.terminal import print_json
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...planning import Network, Workload
    from ...planning.running_chain import ChainFigures


def plan(
    params: Annotated[
        str | None, typer.Option("--params", metavar="N", help="The number of weights, such as 8B or 1T.", show_default=False)
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="FORMAT", help="The format that engines serve: bf16, fp8, nvfp4, mxfp4 or int4.")
    ] = "bf16",
    density: Annotated[
        str | None,
        typer.Option(
            "--density",
            metavar="SHARE",
            help="The share of the weights that a step changes, such as 0.11%. Default: as recorded.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            "--bits",
            metavar="BITS",
            help="Bits of a delta for each changed weight. Default: as measured at this density.",
            show_default=False,
        ),
    ] = None,
    in_bf16: Annotated[
        str,
        typer.Option("--in-bf16", metavar="N", help="How many weights stay in bf16 if the others are quantised, such as 1.05B."),
    ] = "0",
    full: Annotated[
        str | None,
        typer.Option("--full", metavar="SIZE", help="The size of a full checkpoint, instead of --params.", show_default=False),
    ] = None,
    delta: Annotated[
        str | None,
        typer.Option("--delta", metavar="SIZE", help="The size of a delta, instead of --density.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Take sizes, time between versions and members from a chain that exists, instead of --params.",
            show_default=False,
            callback=lambda url: None if url is None else check_url(url),
        ),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    full_every: Annotated[
        int | None,
        typer.Option(
            "--full-every",
            metavar="STEPS",
            help="Let readers fetch a full checkpoint every N steps. deltawire's readers never need to.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="The number of steps that totals are for.")] = 1000,
    regions: Annotated[int, typer.Option("--regions", metavar="N", help="The number of regions: r1, r2 and so on.")] = 1,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="[rN=]RATE/RTT",
            help="The link to each region, or to one of them. May be repeated. Default: 1Gbit/80ms.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[str, typer.Option("--local", metavar="RATE/RTT", help="Links within a region.")] = "10Gbit/1ms",
    server_latency: Annotated[
        str | None,
        typer.Option(
            "--server-latency",
            metavar="TIME",
            help="The time from a request to a store's first byte, without the network. Default: 20ms, as measured with an S3 server.",
            show_default=False,
        ),
    ] = None,
    members: Annotated[
        int | None,
        typer.Option("--members", metavar="N", help="Members, in all regions together. Default: 64.", show_default=False),
    ] = None,
    no_relays: Annotated[
        bool, typer.Option("--no-relays", help="Send one copy to each member, instead of one to a store in each region.")
    ] = False,
    cut_through: Annotated[
        bool,
        typer.Option(
            "--cut-through/--no-cut-through",
            help="Let readers fetch files while the trainer still encodes others.",
            show_default=False,
        ),
    ] = True,
    streams: Annotated[
        str, typer.Option("--streams", metavar="auto|N", help="How many transfers a reader runs at the same time.")
    ] = "auto",
    staleness: Annotated[int, typer.Option("--staleness", metavar="STEPS", help="The number of updates that a policy may be behind.")] = 1,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="TIME", help="Generation of one step, if no member waits. Default: 60s.", show_default=False),
    ] = None,
    train: Annotated[
        str | None, typer.Option("--train", metavar="TIME", help="Training of one step. Default: half of --step.", show_default=False)
    ] = None,
    tokens: Annotated[float, typer.Option("--tokens", metavar="N", help="Tokens of a task.")] = 4096,
    rate: Annotated[float, typer.Option("--rate", metavar="N", help="Tokens that a member generates in a second.")] = 2500,
    egress: Annotated[float, typer.Option("--egress", metavar="DOLLARS", help="Price of a GB over a link.")] = 0.09,
    gpu_hour: Annotated[float, typer.Option("--gpu-hour", metavar="DOLLARS", help="Price of an hour of a GPU.")] = 2.5,
    gpus_per_member: Annotated[
        int | None,
        typer.Option("--gpus-per-member", metavar="N", help="GPUs of a member. Default: enough for the weights.", show_default=False),
    ] = None,
    trainer_gpus: Annotated[
        int | None,
        typer.Option("--trainer-gpus", metavar="N", help="GPUs of the trainer. Default: 4 × a member's, at least 8.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write a picture of the plan, too.", show_default=False)
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Compute what the training steps of a run would cost, with full weights, XOR + zstd-1 and deltas.

    The table shows the bytes of one copy of an update, the seconds until half of all members and until the last region have it, the
    seconds of a step, the share of time for which members wait, and the speed relative to a network that costs nothing. All methods use
    the same network. Nothing is measured here: sizes come from recorded updates, and times from a model of links. The page "What a step
    costs" describes both.
    """
    with exit_codes(json):
        from ...errors import UnusablePlan
        from ...planning import FleetShape, Prices
        from ...planning import plan as make_plan
        from ...planning.fleet_shape import gpus_to_hold
        from ...planning.quantities import duration
        from ..output.plan_table import print_plan

        if source is None and (trust or run is not None):
            raise typer.BadParameter("--trust and --run say which chain is accepted. Give its location with --from.")
        if plot is not None and plot.suffix != ".svg":
            raise typer.BadParameter(f"{plot} does not end in .svg. The picture is an SVG, so name it FILE.svg.")
        if plot is not None and plot.exists() and not force:
            raise typer.BadParameter(f"{plot} exists already. Name another file, or give --force.")
        seen, counted = (None, 0) if source is None else _read_chain(source, trust, run, full_every, steps)
        try:
            if seen is None:
                workload = _workload(params, dtype, density, bits, in_bf16, full, delta, full_every, steps)
            elif params is not None or full is not None or delta is not None or density is not None or bits is not None:
                raise typer.BadParameter("give --from, or the sizes of a model, not both: each says how large a step is.")
            else:
                workload = seen.workload
            network = _network(regions, link or [], local, server_latency, members, counted, not no_relays, cut_through, streams)
            each = gpus_to_hold(workload.state_bytes) if gpus_per_member is None else gpus_per_member
            usual = 60.0 if seen is None or seen.step_seconds is None else seen.step_seconds
            seconds = usual if step is None else duration(step, "--step")
            fleet = FleetShape(
                seconds,
                seconds / 2 if train is None else duration(train, "--train"),
                staleness,
                tokens,
                rate,
                each,
                max(8, 4 * each) if trainer_gpus is None else trainer_gpus,
            )
            report = make_plan(workload, network, fleet, Prices(egress, gpu_hour))
        except UnusablePlan as error:
            raise typer.BadParameter(error.message) from None
        if plot is not None:
            from ...planning.plot import as_svg

            plot.write_text(as_svg(report), encoding="utf-8")
        if json:
            print_json(report.as_json())
        else:
            print_plan(report)


def _read_chain(url: str, trust: list[str] | None, run: str | None, full_every: int | None, steps: int) -> tuple[ChainFigures, int]:
    """Return what the newest versions of a chain say about its run, and how many members have written heartbeats and not left."""
    from ...fleet.overview import FleetReader
    from ...planning.running_chain import READ_COMMITS, figures_of
    from ..chain_history import read_history

    with opened(url) as store:
        chain = reader_options(run, trust).open_log(store)
        its_id = chain.run.id
        entries = read_history(chain, READ_COMMITS).entries
        seen = figures_of([entry.commit for entry in entries if not entry.abandoned], full_every=full_every, steps=steps)
        with FleetReader(store, its_id, trusted_keys=trust or ()) as reader:
            found = reader.fleet(0).members
    return seen, sum(one.beat.state != "left" for one in found)


def _workload(
    params: str | None,
    dtype: str,
    density: str | None,
    bits: float | None,
    in_bf16: str,
    full: str | None,
    delta: str | None,
    full_every: int | None,
    steps: int,
) -> Workload:
    from dataclasses import replace

    from ...planning.quantities import count, share, size
    from ...planning.workload import DENSITIES, Workload, dtype_named

    if (params is None) == (full is None):
        raise typer.BadParameter("give --params, --full or --from, and only one of them: it says how large the model is.")
    if delta is not None and (density is not None or bits is not None):
        raise typer.BadParameter("give --delta, or --density and --bits, not both: each says how large a delta is.")
    recorded = DENSITIES[dtype_named(dtype)]
    weights = count(params, "--params") if params is not None else 8 * size(full or "", "--full") / recorded.state_bits
    found = Workload.of_model(
        max(weights, 1.0),
        dtype,
        changed=None if density is None else share(density, "--density"),
        bits=bits,
        in_bf16=0 if in_bf16 == "0" else count(in_bf16, "--in-bf16"),
        full_every=full_every,
        steps=steps,
    )
    if delta is None:
        return found
    given = size(delta, "--delta")
    return replace(found, delta_bytes=given, xor_bytes=min(given * recorded.xor_ratio, max(found.state_bytes, given)), changed=None)


def _network(
    regions: int,
    links: list[str],
    local: str,
    server_latency: str | None,
    given: int | None,
    counted: int,
    relays: bool,
    cut_through: bool,
    streams: str,
) -> Network:
    from dataclasses import replace

    from ...planning import CALIBRATED, Network, Region
    from ...planning.link_model import parse_link
    from ...planning.network import MOST_REGIONS
    from ...planning.quantities import checked, duration

    checked(regions, "--regions", most=MOST_REGIONS, least=1)
    members = max(counted or 64, regions) if given is None else given
    if members < regions:
        raise typer.BadParameter(f"{members} members are too few for {regions} regions: each region needs one.")
    if streams != "auto" and not re.fullmatch(r"[1-9][0-9]?", streams):
        raise typer.BadParameter(f"--streams is {streams[:20]!r}. Give auto, or a number from 1 to 64.")
    names = [f"r{number}" for number in range(1, regions + 1)]
    usual, named = "1Gbit/80ms", {}
    for each in links:
        name, _, value = each.rpartition("=")
        if not name:
            usual = value
        elif name in names:
            named[name] = value
        else:
            known = f"The regions are r1 to r{regions}." if regions > 1 else "The only region is r1; --regions adds others."
            raise typer.BadParameter(f"--link names the region {name[:20]!r}. {known}")
    shares = [members // regions + (number < members % regions) for number in range(regions)]
    return Network(
        [Region(name, parse_link(named.get(name, usual), "--link"), share) for name, share in zip(names, shares, strict=True)],
        parse_link(local, "--local"),
        relays,
        None if streams == "auto" else int(streams),
        cut_through,
        model=CALIBRATED if server_latency is None else replace(CALIBRATED, server_seconds=duration(server_latency, "--server-latency")),
    )
