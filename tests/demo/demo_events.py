"""The events of a run of the demo in which one member is killed during a task, and another member joins."""

from __future__ import annotations

import itertools
from typing import Any

DIGEST = "6f1d0c77a3b1e0d4f1aa09315c0b77de"
WEIGHTS = 1_000_000
STATE_BYTES = 2 * WEIGHTS


def run(steps: int = 20, *, digests: dict[str, str | None] | None = None, published: str = DIGEST) -> list[dict[str, Any]]:
    """Return all events in order. `digests` are the digests of members that differ from the trainer's; None means that none is reported."""
    clock = itertools.count(0.0, 0.25)
    told: list[dict[str, Any]] = []

    def tell(source: str, name: str, **fields: Any) -> None:
        told.append({"event": name, "from": source, "at": next(clock), **fields})

    def swap(member: str, step: int, size: int) -> None:
        tell(member, "synced", seq=step + 1, step=step, bytes=size)
        tell(member, "swapped", seq=step + 1, step=step, pause_seconds=0.001 * (step + 1))

    def work(member: str, number: int, task: int, attempt: int = 0) -> None:
        tell(member, "generating", round=number, task=task, attempt=attempt, seq=number)
        tell(member, "generated", round=number, task=task, tokens=100, seconds=0.2)
        tell(member, "rollout-uploaded", member=member, round=number, task=task, tokens=100)
        tell("trainer", "rollout-accepted", round=number, task=task, attempt=attempt, member=member, tokens=100, step=number)

    tell("demo", "demo", store="build/demo/store", steps=steps)
    living = ["steady", "slow", "unlucky"]
    for member in living:
        tell("demo", "process-started", who=member, part=f"the {member} one", late=False, pid=1)
    tell("demo", "process-started", who="trainer", part="", late=False, pid=2)
    tell("trainer", "model", weights=WEIGHTS, state_bytes=STATE_BYTES, reward="known_words")
    tell("trainer", "pretraining", share=0.5, loss=2.5)
    tell("trainer", "published", kind="anchor", step=0, seq=1, bytes=STATE_BYTES + 100, state_bytes=STATE_BYTES, changed=0)
    for member in living:
        tell(member, "joined", member=member, rewards="known_words")
        swap(member, 0, STATE_BYTES + 100)
    for step in range(1, steps + 1):
        work("steady", step, 0)
        if step == steps // 2:
            tell("unlucky", "generating", round=step, task=1, attempt=0, seq=step)
            tell("unlucky", "halted")
            tell("demo", "process-started", who="newcomer", part="the newcomer", late=True, pid=3)
            tell("demo", "process-ended", who="unlucky", code=-9, killed=True)
            work("slow", step, 1, attempt=1)
            tell("newcomer", "joined", member="newcomer", rewards="known_words")
            swap("newcomer", step - 1, STATE_BYTES + 5000)
            living = ["steady", "slow", "newcomer"]
        else:
            work(living[1 + step % 2], step, 1)
        if step == 3:
            tell("trainer", "rollout-rejected", reason="duplicate", round=2, task=1, attempt=1, member="slow", step=2)
        sizes = {"bytes": 10_000 + step, "state_bytes": STATE_BYTES, "changed": WEIGHTS // 100}
        tell("trainer", "published", kind="delta", step=step, seq=step + 1, **sizes)
        seconds = {"idle_seconds": 0.2, "train_seconds": 0.5, "publish_seconds": 0.01}
        tell("trainer", "trained", step=step, reward=0.1 + step / 100, tokens=200, lag=0.5, mismatch_kl=1e-3, **sizes, **seconds)
        for member in living[:: 1 + step % 2]:
            swap(member, step, 10_000 + step)
    tell("trainer", "finished", step=steps, digest=DIGEST, published=published)
    for member in living:
        tell(member, "left", member=member, tokens=1)
        digest = (digests or {}).get(member, DIGEST)
        if digest is not None:
            tell(member, "weights", digest=digest)
        tell("demo", "process-ended", who=member, code=0, killed=False)
    tell("demo", "process-ended", who="trainer", code=0, killed=False)
    tell("demo", "ended")
    return told
