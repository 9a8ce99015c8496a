"""The gate of the live demo. It does the work of `deltawire gate URL --metric liked --monitor length:+50%`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from child import tell, tell_event, told_to_stop

from deltawire import ReaderOptions
from deltawire.errors import DeltawireError
from deltawire.live.declared_metrics import declared_metrics
from deltawire.live.gate import Gate, GateOptions
from deltawire.live.gate_rules import GatePolicy, Limit, Range

POLL = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--alpha", type=float, default=0.05)
    arguments = parser.parse_args()
    limits = (Limit.parse("liked", must_hold=True), Limit.parse("length:+50%", must_hold=False))
    policy = GatePolicy(limits, alpha=arguments.alpha, min_answers=50, max_seconds=600.0)
    stop = told_to_stop()
    with ReaderOptions().open_store(arguments.url) as store:
        log = ReaderOptions().open_log(store)
        gate = Gate(
            log, policy, lambda: declared_metrics(log), options=GateOptions(ranges={"length": Range(0.0, 64.0)}), on_event=tell_event
        )
        tell("watching")
        while not stop.wait(POLL):
            try:
                gate.look()
            except DeltawireError as error:
                if not error.retryable:
                    raise


if __name__ == "__main__":
    main()
