"""The engine of a member: generation takes time, it follows the chain with delay, and it swaps weights during generation."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from ...fleet.rules.staleness import KnownVersion
from ...fleet.steps.requests import Generate, Sync
from ...format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from .chain_model import ChainModel
from .kernel import Kernel, VirtualThread

_LONGEST = 8


class EngineModel:
    """Answers `Sync` and `Generate`.

    Parameters
    ----------
    kernel
        Virtual time.
    random
        Draws delays, lengths and tokens.
    chain
        The chain that the engine follows.
    rate
        Tokens per second.
    sync_seconds
        About how long an update takes.
    pinned
        If true, the engine keeps the first version that it got, and claims to have the newest one.
    """

    def __init__(
        self, kernel: Kernel, random: Random, chain: ChainModel, *, rate: float, sync_seconds: float, pinned: bool = False
    ) -> None:
        self._kernel = kernel
        self._random = random
        self._chain = chain
        self.rate = rate
        self.sync_seconds = sync_seconds
        self._pinned = pinned
        self.version: KnownVersion | None = None
        self._is_fetching = False

    def sync(self, thread: VirtualThread, request: Sync) -> None:
        """Fetch the version that is newest now. It may be old when it arrives. Wait for it if the engine's own version is too old."""
        target = self._chain.head()
        behind = target is not None and (self.version is None or self.version.seq != target.seq)
        is_too_old = self.version is None or self.version.step < request.step
        if self._pinned and self.version is not None:
            self._kernel.later(0.0, thread.resume, target)
            return
        if behind and is_too_old:
            self._kernel.later(self.sync_seconds * (0.5 + self._random.random()), self._synced, thread, target)
            return
        if behind and not self._is_fetching and self._random.random() < 0.5:
            self._is_fetching = True
            self._kernel.later(self.sync_seconds * (0.5 + self._random.random()), self._fetched, thread, target)
        self._kernel.later(0.0, thread.resume, self.version)

    def generate(self, thread: VirtualThread, request: Generate) -> None:
        """Complete every prompt. A version that is published meanwhile may be swapped in before the end."""
        lengths = [1 + self._random.randrange(_LONGEST) for _ in range(len(request.rows) * request.round.samples)]
        self._kernel.later(sum(lengths) / self.rate, self._generated, thread, request, lengths, self.version)

    def _fetched(self, thread: VirtualThread, version: KnownVersion) -> None:
        """Swap a version in that was fetched during other work."""
        if thread.process.running(self._fetched, thread, version):
            self.version = version
            self._is_fetching = False

    def restart(self) -> None:
        """Forget the version, as a new process does."""
        self.version = None
        self._is_fetching = False

    def _synced(self, thread: VirtualThread, version: KnownVersion) -> None:
        if thread.process.running(self._synced, thread, version):
            self.version = version
            thread.resume(version)

    def _generated(self, thread: VirtualThread, request: Generate, lengths: list[int], first: KnownVersion | None) -> None:
        if not thread.process.running(self._generated, thread, request, lengths, first):
            return
        assert first is not None
        newest = self._chain.head()
        if newest is not None and newest.seq != first.seq and not self._pinned and self._random.random() < 0.5:
            self.version = newest
        thread.resume(self._rollouts(request, lengths, [first, self.version or first]))

    def _rollouts(self, request: Generate, lengths: list[int], made_by: list[KnownVersion]) -> Rollouts:
        lease, samples = request.lease, request.round.samples
        completions = tuple(
            self._completion(index // samples, length, made_by, swapped=index == len(lengths) - 1) for index, length in enumerate(lengths)
        )
        used = {span.seq for one in completions for span in one.spans}
        return Rollouts(
            run=request.round.id,
            round=lease.round,
            task=lease.task,
            attempt=lease.attempt,
            member=lease.member,
            nonce=lease.nonce,
            prompts=tuple(np.array([1], np.int32) for _ in request.rows),
            completions=completions,
            reward_names=("simulated",),
            versions={version.seq: ClaimedVersion(version.step, version.digest) for version in made_by if version.seq in used},
        )

    def _completion(self, prompt: int, length: int, made_by: list[KnownVersion], *, swapped: bool) -> Completion:
        first, last = made_by
        spans: tuple[TokenSpan, ...] = (TokenSpan(0, length, first.seq),)
        if swapped and length > 1 and first.seq != last.seq:
            spans = (TokenSpan(0, length // 2, first.seq), TokenSpan(length // 2, length, last.seq))
        tokens: Any = np.array([self._random.getrandbits(31) for _ in range(length)], np.int32)
        return Completion(prompt, tokens, np.zeros(length, np.float32), np.ones(length, np.uint8), (0.0,), spans, True)
