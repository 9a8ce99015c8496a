"""A publisher that quantises dies, or gets no answer, at every write of a session. The next one continues with the same scales."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from plain_reader import read_commits, read_states
from publications import repeated
from support import bits_of

from deltawire import Publisher, WriterOptions
from deltawire.chain.maintenance.verify import verify
from deltawire.quantise.quantise import quantise_state
from deltawire.store import Store
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied

VERSIONS = 3
OPTIONS = WriterOptions(segment_bytes=800, threads=1)


def masters(step: int) -> dict[str, Any]:
    """Return the weights of a step. They shrink, so that scales stay, and grow later, so that they do not."""
    random = np.random.default_rng(1)
    names = [f"layers.0.{part}_proj.weight" for part in "qkv"]
    state = {name: random.standard_normal((16, 32)).astype(np.float32) for name in names}
    state["layers.0.q_proj.weight"] *= np.float32([1, 0.9, 0.8, 2, 3][step])
    state["layers.0.v_proj.weight"] *= np.float32(5)  # so the global scale, which q, k and v share, stays
    return state | {"norm.weight": random.standard_normal(32).astype(np.float32) * np.float32(step + 1)}


def publish(store: Store, steps: range, *, tries: int = 1) -> None:
    publisher = repeated(lambda: Publisher(store, quantise="nvfp4", attachments={"config.json": b"{}"}, options=OPTIONS), tries)
    with contextlib.ExitStack() as opened:
        opened.callback(publisher.close)
        for step in steps:
            repeated(lambda step=step: publisher.publish(masters(step), step=step), tries)


def is_write(call: Call) -> bool:
    return call.op in ("put", "put_if_absent") and call.key.startswith(("data/", "commit/", "epoch/"))


class NthWrite:
    """A condition that holds for the n-th write."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, call: Call) -> bool:
        self._left -= is_write(call)
        return is_write(call) and self._left == 0


def assert_versions_are_quantised_one_after_the_other(store: Store) -> list[int]:
    """Compare each version with what the recipe makes of its step and of the version before. Return the steps."""
    steps = {commit["seq"]: commit["step"] for commit in read_commits(store) if commit["kind"] != "fence"}
    previous = None
    for seq, state in sorted(read_states(store).items()):
        previous = quantise_state(masters(steps[seq]), "nvfp4", previous)
        assert bits_of(state) == bits_of(previous)
    assert verify(store, deep=True, threads=1).ok
    return [step for _, step in sorted(steps.items())]


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["crash", "unknown"])
def test_a_publisher_that_quantises_is_followed_by_one_with_its_scales(fault: Any, kind: Any) -> None:
    first = quantise_state(masters(0), "nvfp4")
    fresh = quantise_state(masters(1), "nvfp4")
    assert bits_of(fresh) != bits_of(quantise_state(masters(1), "nvfp4", first)), "this test would not see whether scales are kept"
    number, met = 1, True
    while met:
        condition = NthWrite(number)
        store = FaultyStore(MemoryStore(), [fault(condition, kind)])
        with contextlib.suppress(ProcessDied):
            publish(store, range(VERSIONS), tries=1 if kind == "crash" else 2)
        met = condition._left <= 0
        known = [commit["step"] for commit in read_commits(store.inner) if commit["kind"] != "fence"]
        assert kind == "crash" or known == [*range(VERSIONS)]
        publish(store.inner, range(len(known), VERSIONS + 1))
        assert assert_versions_are_quantised_one_after_the_other(store.inner) == [*range(VERSIONS + 1)]
        number += 1
    assert number > 6
