"""The tables of the benchmark. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from report import Table

from deltawire.planning.link_model import Link, transfer_seconds

from .generation import ideal
from .link_check import LinkCheck
from .measured import BOUND, DELTAWIRE, FULL, METHODS, XOR, Ablation, Update
from .network import Shape
from .options import RTTS
from .scenarios import LATER_READ, Fetch, LoopRun

GENERATIONS = (20.0, 60.0)
"""Seconds of generation for each step, in the loops that are computed from measured times."""

_GOAL, _SPARROW = 0.98, "SparrowRL: 91.09–98.7%"
_MTU = 9000
_WHAT = [
    "Real: namespaces, TCP, an S3 server (SeaweedFS), all bytes, deltawire's publisher and readers, which check the hash of each file.",
    "About 1 B weights are encoded, decoded and written by this machine's cores, and all bits of all regions are compared. "
    "With more weights, three regions on these cores would measure the cores: versions are encoded ahead, regions fetch and check them, "
    "and both deltas are charged the time of two cores for their encoding and decoding, measured with one block in this run, "
    "and the time of an H200 for writing the weights (docs/gpu-measurements.md).",
    "Emulated: the delay and the rate of links (benchmarks/wan/link.cpp), training, and generation at a fixed speed.",
    "Weights are one block of 2^27 weights with the recorded density, repeated under other names, so that they fit into memory.",
    "Everything runs on one machine. Its cores are shared by the trainer, the server, the links and three regions, "
    "and they are the limit at 10 Gbit/s.",
]


def links(found: Sequence[tuple[Shape, LinkCheck]]) -> Table:
    """Return the table of the links themselves."""
    table = Table("wan-links", "Emulated links by themselves", ["nominal", "round trip", "one TCP stream", "eight streams"])
    for shape, check in found:
        table.rows.append([shape.text(), f"{1e3 * check.rtt:.1f} ms", _rate(check.one), _rate(check.eight)])
    return table


def updates(found: Sequence[Update]) -> Table:
    """Return the table of updates by each method."""
    delays = " / ".join(f"{1e3 * rtt:.0f}" for rtt in RTTS)
    table = Table(
        "wan-updates",
        f"Updates of three regions ({delays} ms), seconds, and tokens per second with staleness 1",
        ["weights", "links", "method", "bytes over each link", "publish", "link", "decode", "swap", "all serve", *_tokens_columns()],
    )
    for weights, rate in dict.fromkeys((update.weights, update.rate) for update in found):
        here = {update.method: update for update in found if (update.weights, update.rate) == (weights, rate)}
        for method in METHODS:
            if method in here:
                table.rows.append(_row(here[method]))
    table.notes += [
        "publish: until regions can begin to fetch. link: looking for the version and waiting for its bytes. "
        "All times are those of the slowest region.",
        "Tokens are shares of those over a network that costs nothing, in the loop that all methods share, with the measured times: "
        "generation takes the seconds in the heading, and training half of them.",
        "Every method is charged its upload, which overlaps encoding, and its decoding, which overlaps fetching. "
        "Full weights need no codec, four blocks of them were uploaded and the time of all was computed from that, "
        "and loading them takes no time here. "
        "XOR deltas: encoding was measured with one block on one core, and divided by two cores.",
        "Rows with a star are computed: from the goodput of smaller full weights over the same links, which the cores of this machine "
        "reduce, or from the rate of the link alone, which no system exceeds.",
        *_WHAT,
    ]
    _check_updates(table, found)
    return table


def _tokens_columns() -> list[str]:
    return [f"tokens, {seconds:.0f} s" for seconds in GENERATIONS]


def _row(update: Update) -> list[str]:
    slowest = max(range(len(update.serves)), key=lambda region: update.serves[region])
    star = " *" if update.is_computed else ""
    return [
        f"{update.weights / 1e9:.2f} B",
        f"{update.rate / 1e9:g} Gbit/s",
        update.method + star,
        _bytes(max(update.link_bytes)),
        f"{update.publish:.2f}",
        f"{update.links[slowest]:.2f}",
        f"{update.decode[slowest]:.2f}",
        f"{update.pauses[slowest]:.2f}",
        f"{max(update.serves):.2f}",
        *[f"{update.tokens(seconds):.1%}" for seconds in GENERATIONS],
    ]


def _check_updates(table: Table, found: Sequence[Update]) -> None:
    largest = max((update.weights for update in found), default=0.0)
    here = {update.method: update for update in found if update.weights == largest and update.rate == 1e9}
    if DELTAWIRE not in here:
        return
    share = here[DELTAWIRE].tokens(GENERATIONS[-1])
    label = f"{largest / 1e9:.1f} B at 1 Gbit/s, {GENERATIONS[-1]:.0f} s of generation"
    table.check(f"{label}: at least 98% of a network that costs nothing (is {share:.1%}; {_SPARROW})", share >= _GOAL)
    if BOUND in here:
        seconds = GENERATIONS[0]
        ratio = here[DELTAWIRE].tokens(seconds) / here[BOUND].tokens(seconds)
        label = f"{largest / 1e9:.1f} B at 1 Gbit/s, {seconds:.0f} s of generation"
        table.check(
            f"{label}: at least 2.4 times the tokens of full weights at the rate of the link (is {ratio:.1f}; SparrowRL: 2.4–9.5)",
            ratio >= 2.4,
        )


def loop(run: LoopRun, found: Sequence[Update]) -> Table:
    """Return the table of the loop that ran in real time, and of the same loop with other methods, computed."""
    goal = ideal(run.loop)
    weights = run.updates[0].weights
    rate = run.updates[0].rate
    table = Table(
        "wan-loop",
        f"Steps with {run.loop.generation:.0f} s of generation and {run.loop.training:.0f} s of training, staleness {run.loop.staleness}: "
        f"{weights / 1e9:.1f} B weights, three regions, {rate / 1e9:g} Gbit/s",
        ["method", "tokens/s", "of an ideal network", "how"],
    )
    table.rows.append(["a network that costs nothing", f"{goal:,.0f}", "100%", "computed"])
    table.rows.append([DELTAWIRE, f"{run.tokens:,.0f}", f"{run.tokens / goal:.1%}", f"ran for {run.completed[-1]:.0f} s"])
    for method in (XOR, FULL, BOUND):
        for update in found:
            if (update.method, update.weights, update.rate) == (method, weights, rate):
                share = update.tokens(run.loop.generation)
                how = "computed" if update.is_computed else "computed from the measured transfer"
                table.rows.append([method, f"{share * goal:,.0f}", f"{share:.1%}", how])
    table.notes.append(
        "Versions were encoded and published by two cores of this machine when training ended, "
        "and readers in three regions found, fetched and checked them while the loop ran. "
        "Decoding was not run, because three regions would share these cores: its time on two cores is added to each arrival. "
        "A region makes no tokens while its weights are written, for which the time of an H200 is added."
    )
    table.check(f"at least 98% of a network that costs nothing (is {run.tokens / goal:.1%}; {_SPARROW})", run.tokens >= _GOAL * goal)
    return table


def ablations(found: Sequence[Ablation]) -> Table:
    """Return the table of the effect of each part."""
    table = Table(
        "wan-ablations",
        "The effect of each part",
        [
            "part",
            "weights, links",
            "bytes over each link: without",
            "with",
            "all serve: without",
            "with",
            "tokens with staleness 0, 20 s: without",
            "with",
            "more by",
        ],
    )
    for each in found:
        before, after = each.without.tokens(GENERATIONS[0], 0), each.with_it.tokens(GENERATIONS[0], 0)
        table.rows.append(
            [
                each.name,
                f"{each.with_it.weights / 1e9:.1f} B, {each.with_it.rate / 1e9:g} Gbit/s",
                _bytes(max(each.without.link_bytes)),
                _bytes(max(each.with_it.link_bytes)),
                f"{max(each.without.serves):.2f} s",
                f"{max(each.with_it.serves):.2f} s",
                f"{before:.1%}",
                f"{after:.1%}",
                f"{after / before - 1:+.1%}",
            ]
        )
    table.notes.append(
        "With staleness 1 transfers hide behind generation, and no part changes the tokens. "
        "With staleness 0 each step waits for its weights."
    )
    return table


def model(found: Sequence[Fetch]) -> Table:
    """Return the table that compares measured transfers with those of the planner."""
    table = Table(
        "wan-model",
        "Seconds of transfers over emulated links of 30 / 80 / 150 ms, measured and computed by the planner",
        ["transfer", "rate", "measured", "planner", "planner / measured"],
    )
    errors = []
    for what, nbytes, rate in dict.fromkeys((each.what, each.nbytes, each.shape.rate) for each in found):
        here = [each for each in found if (each.what, each.nbytes, each.shape.rate) == (what, nbytes, rate)]
        is_new = what != LATER_READ
        computed = [
            transfer_seconds(each.objects, each.nbytes, Link(each.shape.rate, each.shape.rtt, _MTU), is_new=is_new) for each in here
        ]
        ratios = [seconds / each.seconds for seconds, each in zip(computed, here, strict=True)]
        errors += [abs(ratio - 1) for ratio in ratios if rate <= 1e9]
        table.rows.append(
            [
                f"{what}, {_bytes(nbytes)} in {here[0].objects} objects",
                f"{rate / 1e9:g} Gbit/s",
                " / ".join(f"{each.seconds:.2f}" for each in here),
                " / ".join(f"{seconds:.2f}" for seconds in computed),
                " / ".join(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    table.notes.append(
        "Each region fetched the same objects at the same time, in as many streams as the reader chose. "
        "Full weights and the first read of a delta used new connections; a later read is the third, over the same connections. "
        "The planner plans later reads, because readers follow a chain. At 10 Gbit/s the cores of this machine are the limit."
    )
    if errors:
        table.notes.append(f"Largest difference up to 1 Gbit/s: {max(errors):.0%}.")
    return table


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _rate(bits: float) -> str:
    return f"{bits / 1e6:,.0f} Mbit/s"
