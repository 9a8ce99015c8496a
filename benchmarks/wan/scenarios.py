"""The measurements: links, updates by each method, and a loop of generation in real time."""

from __future__ import annotations

import time
from collections.abc import Iterator
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

CORES = 2
"""Cores that encode XOR deltas, of which one block was encoded by one core."""
READERS = 4
"""Readers in each region, where relays are compared."""


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
        for rate in options.rates:
            emulation.shape(rate, RTTS)
            if options.runs_full(copies * BLOCK_BYTES, rate):
                full[rate] = made = _plain(FULL, emulation.send("full", copies=copies, decodes=True), copies, rate)
                yield made
            elif rate in full:
                yield scaled(full[rate], copies * BLOCK, copies * BLOCK_BYTES)
            yield bound(copies * BLOCK, copies * BLOCK_BYTES, rate, len(RTTS))
            yield _plain(XOR, emulation.send("xor", copies=copies, decodes=is_decoded), copies, rate, encodes=is_decoded)
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
        Whether readers decode versions. Otherwise the times of a GPU are added.
    following
        Options of `Emulation.begin_following`.
    """
    emulation.begin_following(decodes=is_decoded, **following)
    codec = Codec() if is_decoded else Codec.of_gpu(emulation.copies * BLOCK)
    found = []
    for _ in range(versions):
        emulation.train()
        found.append(_update(emulation.publish(), emulation.copies, rate, codec))
    emulation.end_following()
    if is_decoded:
        emulation.check_bits()
    return mean(found)


def fetches(emulation: Emulation, options: Options, found: list[Update]) -> Iterator[Fetch]:
    """Fetch as many objects, of the same sizes, as the largest delta has, without decoding them. Add the full weights that were fetched."""
    for update in found:
        if update.method == FULL and not update.is_computed:
            for rtt, seconds in zip(RTTS, update.links, strict=True):
                yield Fetch("full weights", Shape(update.rate, rtt), round(update.nbytes / BLOCK_BYTES), update.nbytes, seconds)
    largest = max((update for update in found if update.method == DELTAWIRE), key=lambda update: update.nbytes)
    copies = round(largest.weights / BLOCK)
    for rate in options.rates:
        emulation.shape(rate, RTTS)
        sent = emulation.send("objects", copies=copies, size=round(largest.nbytes / copies))
        for rtt, arrival in zip(RTTS, sent.arrivals, strict=True):
            yield Fetch("files of a delta", Shape(rate, rtt), copies, sent.nbytes, arrival.served - sent.begin)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Objects that one region fetched, and nothing else: how many, their bytes together, and the seconds."""

    what: str
    shape: Shape
    objects: int
    nbytes: float
    seconds: float


def ablations(emulation: Emulation, options: Options) -> Iterator[Ablation]:
    """Measure the largest size with one stream and with several, and with and without relays; and cut-through with a smaller size."""
    rate, versions = options.loop_rate, options.versions
    emulation.shape(rate, RTTS)
    several = deltas(emulation, rate, versions, is_decoded=False)
    one = deltas(emulation, rate, versions, is_decoded=False, store={"streams": 1})
    yield Ablation("several streams instead of one", one, several)
    direct = deltas(emulation, rate, versions, is_decoded=False, readers=READERS)
    with relay_servers(emulation) as servers:
        relayed = deltas(emulation, rate, versions, is_decoded=False, readers=READERS, relays=servers)
    yield Ablation(f"a relay, {READERS} readers in each region", direct, relayed)
    slowest = min(options.rates)
    emulation.shape(slowest, RTTS)
    copies = copies_for(sorted(options.sizes)[len(options.sizes) // 2])
    found = []
    for announce in (False, True):
        emulation.begin_run(copies, writer={"announce": announce})
        emulation.begin_following(decodes=False)
        made = []
        for _ in range(versions):
            emulation.train()
            made.append(_update(emulation.publish(), copies, slowest, Codec(swap=Codec.of_gpu(copies * BLOCK).swap)))
        emulation.end_following()
        found.append(mean(made))
    yield Ablation("cut-through, encoding on two cores", *found)


def _plain(method: str, transfer: Transfer, copies: int, rate: float, *, encodes: bool = True) -> Update:
    """Return an update with full weights or XOR deltas."""
    return Update(
        method,
        copies * BLOCK,
        rate,
        transfer.nbytes,
        [arrival.link_bytes for arrival in transfer.arrivals],
        transfer.phases["encode_seconds"] / CORES if encodes else 0.0,
        [arrival.served - transfer.begin for arrival in transfer.arrivals],
        [arrival.phases["decode_seconds"] for arrival in transfer.arrivals],
        [0.0] * len(transfer.arrivals),
    )


def _update(transfer: Transfer, copies: int, rate: float, codec: Codec) -> Update:
    """Return an update by deltawire. A member that has just looked finds a version later, so looking is a part of the transfer."""
    publish = transfer.published - transfer.begin
    return Update(
        DELTAWIRE,
        copies * BLOCK,
        rate,
        transfer.nbytes,
        [arrival.link_bytes for arrival in transfer.arrivals],
        publish + codec.encode,
        [arrival.swap_begin - transfer.begin - publish + codec.decode for arrival in transfer.arrivals],
        [arrival.phases["resolve_seconds"] + codec.decode for arrival in transfer.arrivals],
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
    """Run the loop in real time with deltawire: versions are published when training ends, and readers follow on their own.

    Versions are encoded ahead and not decoded. The times of a GPU are added.

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
    emulation.begin_following(decodes=False)
    codec = Codec.of_gpu(emulation.copies * BLOCK)
    loop = Loop(len(emulation.members), SPEED, generation, TRAINING_SHARE * generation)
    first = loop.staleness + 2
    emulation.train(first + batches - 1)
    progress = Progress(loop, time.monotonic())
    found: list[Update] = []
    for batch in range(1, first + batches):
        if len(progress.completed) < batch:
            end = progress.batch_ends()
            _sleep_until(end)
            progress.advance(end)
        _sleep_until(progress.completed[batch - 1] + loop.training + codec.encode)
        transfer = emulation.publish()
        for moment, region, is_served in _changes(transfer, codec):
            if is_served:
                progress.serve(region, batch, moment)
            else:
                progress.pause(region, moment)
        found.append(_update(transfer, emulation.copies, rate, codec))
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
