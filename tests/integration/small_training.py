"""Publish a small training run, and check its chain."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from plain_reader import read_states
from support import bits_of, copied, publisher_arguments

from deltawire.chain.maintenance.verify import verify
from deltawire.publish.publisher import Publisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy

NEVER = AnchorPolicy(min_versions=10**6, max_versions=None)
SECOND_COMMIT = "commit/00000000000000000002"


class Training:
    """A model of a few tensors, and all states that it had."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.state = {f"layer.{i}.weight": self.random.standard_normal((16, 24)).astype(ml_dtypes.bfloat16) for i in range(5)}
        self.state["norm"] = self.random.standard_normal(7).astype(np.float32)
        self.state["steps"] = np.array(0, np.int64)

    def step(self) -> dict:
        """Change a few weights in place, not in every tensor, and return a copy."""
        for name in self.random.choice(sorted(self.state), 4, replace=False):
            array = self.state[name]
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[self.random.integers(0, bits.size, 3)] ^= 1
        return copied(self.state)


def publisher(store, **given) -> Publisher:
    """Open a publisher. `given` holds its parameters and the fields of `WriterOptions`."""
    return Publisher(store, **publisher_arguments(**({"segment_bytes": 1000, "anchor_policy": NEVER} | given)))


def published(store, count: int = 3, training: Training | None = None, **options) -> dict[int, dict]:
    """Publish some versions, each with the shortcuts that are due, and return their states by sequence number."""
    training = training or Training()
    states: dict[int, dict] = {}
    with publisher(store, **options) as chain:
        for _ in range(count):
            take_step(chain, training, states)
    return states


def take_step(chain: Publisher, training: Training, states: dict[int, dict]) -> None:
    """Train and publish one step, wait for the shortcuts that are due, and record the published state."""
    state = training.step()
    states[chain.publish(state).seq] = state
    chain.flush()


def assert_chain_holds(store, states) -> None:
    found = read_states(store)
    assert found.keys() >= states.keys()
    for seq, state in states.items():
        assert bits_of(found[seq]) == bits_of(state), seq
    report = verify(store, deep=True)  # this also checks shortcuts
    assert report.ok, report
