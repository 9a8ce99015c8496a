"""A fleet in virtual time: the real steps of trainer and members, over a modelled store, with everything going wrong that can.

    python -m deltawire.testing.fleet_simulation --seeds 10000

A seed is a run. In every run and after every event: nothing is trained twice in one line of history, nothing acknowledged is lost that
still holds, nothing stale, abandoned or foreign is accepted; and when faults cease, the run goes on to its end.
"""

from .scenario import Outcome, simulate

__all__ = ["Outcome", "simulate"]
