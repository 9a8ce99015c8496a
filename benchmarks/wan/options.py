"""The options of the benchmark."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

RTTS = (0.030, 0.080, 0.150)
"""The round-trip times of the three regions, in seconds."""

_FASTEST = 1e9
"""Bits per second that three regions on one machine are expected to receive at the same time, each."""


@dataclass(frozen=True, slots=True)
class Options:
    """The sizes and rates to measure.

    Parameters
    ----------
    rates
        Rates of the links, in bits per second.
    sizes
        Numbers of weights.
    versions
        Versions that are published for each size and rate. Times are their means.
    most_decoded
        With more weights than this, versions are encoded ahead, and regions fetch and check them without decoding.
    longest_full
        Transfers of full weights that need more seconds than this at the link's rate, or at 1 Gbit/s if that is less, are computed from
        the goodput of the others.
    long_full
        Run the transfer of the largest full weights at `loop_rate` in any case.
    loop_batches
        Batches of the loop that runs in real time, after the first ones. 0: it does not run.
    loop_rate
        The rate at which that loop and the ablations run.
    ablations
        Whether to measure streams, relays and cut-through.
    only_ablations
        Whether to measure nothing else.
    check_seconds
        Seconds for which the goodput of each link is measured, once with one stream and once with eight.
    keep
        Whether results are written to benchmarks/results and into the documentation.
    """

    rates: Sequence[float] = (0.25e9, 0.5e9, 1e9, 10e9)
    sizes: Sequence[float] = (1e9, 4e9, 8e9)
    versions: int = 2
    most_decoded: float = 1.2e9
    longest_full: float = 75.0
    long_full: bool = True
    loop_batches: int = 3
    loop_rate: float = 1e9
    ablations: bool = True
    only_ablations: bool = False
    check_seconds: float = 1.0
    keep: bool = True

    def runs_full(self, nbytes: float, rate: float) -> bool:
        """Tell whether a transfer of full weights is run. The others are computed."""
        if 8 * nbytes / min(rate, _FASTEST) <= self.longest_full:
            return True
        return self.long_full and rate == self.loop_rate and nbytes >= 2 * max(self.sizes)


QUICK = Options(
    rates=(1e9,),
    sizes=(0.25e9,),
    versions=1,
    longest_full=20,
    long_full=False,
    loop_batches=0,
    ablations=False,
    check_seconds=0.5,
    keep=False,
)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line.

    Parameters
    ----------
    arguments
        The words after the program. None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="make bench-wan", description="Measure updates over emulated WAN links. It needs root, iproute2, g++ and /dev/net/tun."
    )
    default = Options()
    parser.add_argument("--rates", type=_numbers, help="rates of the links in Gbit/s (default: 0.25,0.5,1,10)")
    parser.add_argument("--sizes", type=_numbers, help="billions of weights (default: 1,4,8)")
    parser.add_argument("--versions", type=int, default=default.versions, help="versions for each size and rate (default: %(default)s)")
    parser.add_argument("--longest-full", type=float, default=default.longest_full, metavar="SECONDS", help="longer ones are computed")
    parser.add_argument("--no-long-full", action="store_true", help="compute the largest full weights at 1 Gbit/s, too")
    parser.add_argument("--loop-batches", type=int, default=default.loop_batches, help="batches of the loop in real time; 0 leaves it out")
    parser.add_argument("--no-ablations", action="store_true", help="leave out streams, relays and cut-through")
    parser.add_argument("--only-ablations", action="store_true", help="measure only streams, relays and cut-through")
    parser.add_argument("--quick", action="store_true", help="run small sizes for a minute, to see that it works; nothing is written")
    parser.add_argument("--no-keep", action="store_true", help="do not write results")
    found = parser.parse_args(arguments)
    if found.quick:
        return QUICK
    if found.versions < 1 or found.loop_batches < 0 or not found.longest_full >= 0:
        parser.error("--versions is at least 1; --loop-batches and --longest-full are at least 0")
    if found.only_ablations and found.no_ablations:
        parser.error("--only-ablations and --no-ablations leave nothing to measure")
    return Options(
        rates=tuple(1e9 * rate for rate in found.rates) if found.rates else default.rates,
        sizes=tuple(1e9 * size for size in found.sizes) if found.sizes else default.sizes,
        versions=found.versions,
        longest_full=found.longest_full,
        long_full=not found.no_long_full,
        loop_batches=found.loop_batches,
        ablations=not found.no_ablations,
        only_ablations=found.only_ablations,
        keep=not found.no_keep,
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 0.5,1") from None
    if not all(0 < number <= 100 and math.isfinite(number) for number in numbers):
        raise argparse.ArgumentTypeError("numbers must be above 0 and at most 100")
    return numbers
