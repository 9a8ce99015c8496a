"""A run with real rounds, results and versions. Only the change of the weights in each step is invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_policy import TinyPolicy

from deltawire.fleet import Batch, Coordinator, FleetOptions, Sampling, StalenessBudget
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.store import Store

TASKS = 3


class SmallRun:
    """The trainer's side of the run. `trained` holds the batch of each step."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        staleness: int = 1,
        lease_seconds: int = 2,
        poll_seconds: float = 0.05,
        tokens: int = 24,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.policy = TinyPolicy(folder, store)
        self.budget = StalenessBudget(staleness)
        self.tokens = tokens
        self.versions = {0: self.policy.publish(0)}
        self.trained: dict[int, Batch] = {}
        self.step = 0
        options = FleetOptions(lease_seconds=lease_seconds, poll_seconds=poll_seconds)
        self.fleet = Coordinator(store, epoch=self.policy.publisher.epoch, budget=self.budget, options=options, scheduler=scheduler)

    def open(self, step: int) -> None:
        rows = [[{"prompt": f"w{step} w{task}", "answer": task}] for task in range(TASKS)]
        self.fleet.open_round(rows, for_step=step, sampling=Sampling(samples=2, max_tokens=self.tokens, seed=step))

    def train(self, timeout: float = 120.0) -> Batch:
        """Train the next step.

        Open rounds as far ahead as the budget allows, collect a batch, update the weights, and publish a version.
        """
        for step in range(self.step + 1, self.budget.newest_open(self.step) + 1):
            self.open(step)
        batch = self.fleet.collect(self.step + 1, timeout=timeout)
        self.take(batch)
        return batch

    def take(self, batch: Batch) -> None:
        self.step = batch.step
        self.trained[batch.step] = batch
        self.versions[batch.step] = self.policy.publish(batch.step)
        self.fleet.published(self.versions[batch.step])

    def check(self) -> None:
        """Check that every task was trained once, on what members generated with recent enough versions of the chain."""
        seen: set[tuple[int, int]] = set()
        by_seq = {version.seq: version for version in self.versions.values()}
        assert sorted(self.trained) == list(range(1, self.step + 1))
        for step, batch in self.trained.items():
            assert len(batch.rollouts) == TASKS
            for rollouts in batch.rollouts:
                assert (rollouts.round, rollouts.task) not in seen
                seen.add((rollouts.round, rollouts.task))
                assert len(rollouts.completions) == 2
                for seq, made_by in rollouts.versions.items():
                    assert self.budget.admits(step, made_by.step)
                    assert (made_by.step, made_by.digest) == (by_seq[seq].step, by_seq[seq].digest)
                for completion in rollouts.completions:
                    assert completion.rewards == (float(len(completion.tokens)),)

    def members(self) -> dict[str, Any]:
        return {status.member: status for status in self.fleet.members()}

    def close(self) -> None:
        self.fleet.close()
        self.policy.publisher.close()
