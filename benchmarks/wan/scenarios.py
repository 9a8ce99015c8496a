"""The measurements: links, updates by each method, and a loop of generation in real time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import link_check
from .emulation import Emulation, Transfer, relay_servers
from .generation import Loop, Progress
from .link_check import LinkCheck
from .measured import DELTAWIRE, FULL, SPEED, TRAINING_SHARE, XOR, Ablation, Codec, Update, bound, mean, scaled
from .network import Shape
from .options import RTTS, Options
from .weights import BLOCK, BLOCK_BYTES, copies_for

FIRST_READ, LATER_READ = "files of a delta, first read", "files of a delta, later read"
_READS = 3
READERS = 4
"""Readers in each region, where relays are compared."""
SHORT_BLOCKS = 2
"""Blocks of full weights that are also fetched over the slowest links: a transfer that ends soon after its streams have begun."""


def check_links(emulation: Emulation, options: Options) -> Iterator[tuple[Shape, LinkCheck]]:
    """Measure each link by itself, at each rate."""
    for rate in options.rates:
        emulation.shape(rate, RTTS)
        for region, rtt in zip(emulation.network.regions, RTTS, strict=True):
            found = link_check.check(emulation.network, region, options.check_seconds, emulation.folder / "check.log")
            yield Shape(rate, rtt), found


def updates(emulation: Emulation, options: Options) -> Iterator[Update]:
    """Measure, or compute, an update of each size over links of each rate, by each method. The run of the last size stays open."""
    full: dict[float, Update] = {}
    for size in options.sizes:
        copies = copies_for(size)
        is_decoded = size <= options.most_decoded
        begin_run(emulation, copies, is_decoded=is_decoded)
        emulation.train()
        codec = None if is_decoded else Codec.measured(emulation.codecs(), copies, copies * BLOCK, XOR)
        for rate in options.rates:
            emulation.shape(rate, RTTS)
            if options.runs_full(copies * BLOCK_BYTES, rate):
                full[rate] = made = _plain(FULL, emulation.send("full", copies=copies), copies, rate)
                yield made
            elif rate in full:
                yield scaled(full[rate], copies * BLOCK, copies * BLOCK_BYTES)
            yield bound(copies * BLOCK, copies * BLOCK_BYTES, rate, len(RTTS))
            sent = emulation.send("xor", copies=copies, decodes=is_decoded, repeats=options.versions)
            yield _plain(XOR, sent, copies, rate, codec)
        for rate in options.rates:
            emulation.shape(rate, RTTS)
            yield deltas(emulation, rate, options.versions, is_decoded=is_decoded)


def begin_run(emulation: Emulation, copies: int, *, is_decoded: bool) -> None:
    """Begin a run whose versions are encoded ahead, unless they are also decoded."""
    emulation.begin_run(copies, is_ahead=not is_decoded, writer={} if is_decoded else {"announce": False})


def deltas(emulation: Emulation, rate: float, versions: int, *, is_decoded: bool, **following: Any) -> Update:
    """Publish versions to readers that follow the run. If they decode, their weights are compared with the trainer's in the end.

    Parameters
    ----------
    emulation
        The emulation, in which a run has begun.
    rate
        The rate of the links.
    versions
        The number of versions. Times are their means.
    is_decoded
        Whether readers decode versions. Otherwise encoding and decoding are charged by the time of one block.
    following
        Options of `Emulation.begin_following`.
    """
    emulation.begin_following(decodes=is_decoded, **following)
    codec = Codec() if is_decoded else own_codec(emulation)
    found = []
    for _ in range(versions):
        emulation.train()
        found.append(_update(emulation.publish(), emulation.copies, rate, codec))
    emulation.end_following()
    if is_decoded:
        emulation.check_bits()
    return mean(found)


def own_codec(emulation: Emulation) -> Codec:
    """Return the times of deltawire for the weights of the run."""
    return Codec.measured(emulation.codecs(), emulation.copies, emulation.copies * BLOCK, DELTAWIRE)


def fetches(emulation: Emulation, options: Options, found: list[Update]) -> Iterator[Fetch]:
    """Fetch as many objects, of the same sizes, as the largest delta has, without decoding them. Add the full weights that were fetched.

    A small part of the full weights is fetched over links of the slowest rate, too.
    """
    for update in found:
        if update.method == FULL and not update.is_computed:
            for rtt, seconds in zip(RTTS, update.links, strict=True):
                yield Fetch("full weights", Shape(update.rate, rtt), round(update.nbytes / BLOCK_BYTES), update.nbytes, seconds)
    slowest = min(options.rates)
    if min(options.sizes) > SHORT_BLOCKS * BLOCK:
        emulation.shape(slowest, RTTS)
        [short] = emulation.send("full", copies=SHORT_BLOCKS)
        for rtt, arrival in zip(RTTS, short.arrivals, strict=True):
            yield Fetch("full weights", Shape(slowest, rtt), SHORT_BLOCKS, short.nbytes, arrival.served)
    largest = max((update for update in found if update.method == DELTAWIRE), key=lambda update: update.nbytes)
    copies = round(largest.weights / BLOCK)
    for rate in options.rates:
        emulation.shape(rate, RTTS)
        sent = emulation.send("objects", copies=copies, size=round(largest.nbytes / copies), repeats=_READS)
        for what, transfer in {FIRST_READ: sent[0], LATER_READ: sent[-1]}.items():
            for rtt, arrival in zip(RTTS, transfer.arrivals, strict=True):
                yield Fetch(what, Shape(rate, rtt), copies, transfer.nbytes, arrival.served)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Objects that one region fetched, and nothing else: how many, their bytes together, and the seconds."""

    what: str
    shape: Shape
    objects: int
    nbytes: float
    seconds: float


def ablations(emulation: Emulation, options: Options) -> Iterator[Ablation]:
    """Measure the last size with one stream and with several, and with and without relays; and cut-through with a smaller size.

    Relays are measured over links of the slowest rate, too.
    """
    rate, slowest, versions = options.loop_rate, min(options.rates), options.versions
    emulation.shape(rate, RTTS)
    begin_run(emulation, copies_for(options.sizes[-1]), is_decoded=False)
    emulation.train()
    several = deltas(emulation, rate, versions, is_decoded=False)
    one = deltas(emulation, rate, versions, is_decoded=False, store={"streams": 1})
    yield Ablation("several streams instead of one", one, several)
    with relay_servers(emulation) as servers:
        for each in dict.fromkeys((rate, slowest)):
            emulation.shape(each, RTTS)
            direct = deltas(emulation, each, versions, is_decoded=False, readers=READERS)
            relayed = deltas(emulation, each, versions, is_decoded=False, readers=READERS, relays=servers)
            yield Ablation(f"a relay, {READERS} readers in each region", direct, relayed)
    emulation.shape(slowest, RTTS)
    copies = copies_for(sorted(options.sizes)[len(options.sizes) // 2])
    found = []
    for announce in (False, True):
        emulation.begin_run(copies, writer={"announce": announce})
        emulation.begin_following(decodes=False)
        made = []
        for _ in range(versions):
            emulation.train()
            made.append(_update(emulation.publish(), copies, slowest, Codec(swap=own_codec(emulation).swap)))
        emulation.end_following()
        found.append(mean(made))
    yield Ablation("cut-through, encoding on two cores", *found)


def _plain(method: str, transfers: Sequence[Transfer], copies: int, rate: float, codec: Codec | None = None) -> Update:
    """Return an update with full weights or XOR deltas. Uploads overlap with encoding, and decoding with fetching, as in deltawire.

    With `codec`, regions did not decode, and are charged for it.
    """
    codec = codec or Codec()
    return mean(
        [
            Update(
                method,
                copies * BLOCK,
                rate,
                transfer.nbytes,
                [arrival.link_bytes for arrival in transfer.arrivals],
                max(transfer.phases["encode_seconds"], transfer.phases["upload_seconds"]),
                [max(arrival.served, codec.decode) for arrival in transfer.arrivals],
                [max(arrival.phases["decode_seconds"], codec.decode - arrival.served) for arrival in transfer.arrivals],
                [codec.swap] * len(transfer.arrivals),
            )
            for transfer in transfers
        ]
    )


def _update(transfer: Transfer, copies: int, rate: float, codec: Codec) -> Update:
    """Return an update by deltawire. A member that has just looked finds a version later, so looking is a part of the transfer."""
    publish = transfer.published - transfer.begin
    fetched = [arrival.swap_begin - transfer.published for arrival in transfer.arrivals]
    return Update(
        DELTAWIRE,
        copies * BLOCK,
        rate,
        transfer.nbytes,
        [arrival.link_bytes for arrival in transfer.arrivals],
        max(publish, codec.encode),
        [max(seconds, codec.decode) for seconds in fetched],
        [
            max(arrival.phases["resolve_seconds"], codec.decode - seconds)
            for arrival, seconds in zip(transfer.arrivals, fetched, strict=True)
        ],
        [arrival.served - arrival.swap_begin + codec.swap for arrival in transfer.arrivals],
    )


@dataclass(frozen=True, slots=True)
class LoopRun:
    """A loop that ran in real time: what it was like, its tokens per second after the first batches, and when each batch was complete."""

    loop: Loop
    tokens: float
    completed: list[float]
    updates: list[Update]


def run_loop(emulation: Emulation, generation: float, batches: int, rate: float) -> LoopRun:
    """Run the loop in real time with deltawire: versions are encoded and published when training ends, and readers follow on their own.

    Versions are not decoded, since three regions would do it on the same cores. The time of decoding is added to each.

    Parameters
    ----------
    emulation
        The emulation, in which a run has begun.
    generation
        Seconds in which all regions together make a batch.
    batches
        The number of batches to count.
    rate
        The rate of the links.
    """
    emulation.shape(rate, RTTS)
    emulation.begin_run(emulation.copies)
    emulation.train()
    codec = own_codec(emulation)
    emulation.begin_following(decodes=False)
    loop = Loop(len(emulation.members), SPEED, generation, TRAINING_SHARE * generation)
    first = loop.staleness + 2
    progress = Progress(loop, time.monotonic())
    found: list[Update] = []
    for batch in range(1, first + batches):
        if len(progress.completed) < batch:
            end = progress.batch_ends()
            _sleep_until(end)
            progress.advance(end)
        emulation.train()
        _sleep_until(progress.completed[batch - 1] + loop.training)
        transfer = emulation.publish()
        for moment, region, is_served in _changes(transfer, codec):
            if is_served:
                progress.serve(region, batch, moment)
            else:
                progress.pause(region, moment)
        found.append(_update(transfer, emulation.copies, rate, Codec(decode=codec.decode, swap=codec.swap)))
    progress.advance(progress.batch_ends())  # nothing can change until then, so it is not waited for
    emulation.end_following()
    counted = progress.completed[first - 1 : first + batches]
    tokens = (len(counted) - 1) * loop.batch / (counted[-1] - counted[0])
    return LoopRun(loop, tokens, [each - progress.completed[0] for each in progress.completed], found)


def _changes(transfer: Transfer, codec: Codec) -> list[tuple[float, int, bool]]:
    """Return when each region began to write its weights, and when it served them, in the order of time."""
    changes = []
    for region, arrival in enumerate(transfer.arrivals):
        begin = arrival.swap_begin + codec.decode
        changes += [(begin, region, False), (begin + arrival.served - arrival.swap_begin + codec.swap, region, True)]
    return sorted(changes)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
