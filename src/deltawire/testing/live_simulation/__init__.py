"""Live traffic in virtual time: gateways, users who react late, and trainers that are killed, frozen and replaced.

    python -m deltawire.testing.live_simulation --seeds 10000

The trainers run the real steps of `deltawire.fleet` and `deltawire.live`. A judge that uses none of that code checks that every interaction
is trained on at most once in a line of history, only with consent, with its own tokens and version, and with the reward that its feedback
says.

many_seeds     many runs in several processes
users          gateways that answer and receive feedback
live_oracle    the judge
live_trainer   a trainer that learns from live traffic
scenario       one run, drawn from a seed
"""

from .scenario import Outcome, simulate

__all__ = ["Outcome", "simulate"]
