"""Provide functions that change a result, and a store that applies them during the upload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3

from deltawire.format.rollouts import Completion, Rollouts, TokenSpan
from deltawire.store import fleet_keys
from deltawire.store.memory import MemoryStore

Poison = Callable[[Rollouts], Rollouts]
MARK = 93
"""A completion that consists only of this token makes the model fail. No check on arrival detects it, and sampling never makes one."""


class PoisonedStore(MemoryStore):
    """A store that applies one poison to each uploaded result until none is left. Later results stay unchanged."""

    def __init__(self, poisons: Iterable[Poison] = ()) -> None:
        super().__init__()
        self.poisons = list(poisons)
        self.poisoned: list[str] = []

    def put(self, key: str, data: Any, **options: Any) -> None:
        place = fleet_keys.parse_rollout_key(key)
        if place is not None and self.poisons:
            data = self.poisons.pop(0)(Rollouts.parse(bytes(data))).to_bytes()
            key = fleet_keys.rollout_key(place._replace(blake3=blake3(data).hexdigest()))
            self.poisoned.append(key)
        super().put(key, data, **options)


def on_first(change: Callable[[Completion], Completion]) -> Poison:
    """Change one completion of a result."""
    return lambda whole: replace(whole, completions=(change(whole.completions[0]), *whole.completions[1:]))


def token(number: int) -> Poison:
    return on_first(lambda one: replace(one, tokens=np.concatenate([[number], one.tokens[1:]]).astype(np.int32)))


MARKED: Poison = on_first(lambda one: replace(one, tokens=np.full(len(one.tokens), MARK, np.int32)))


def reward(number: float) -> Poison:
    return on_first(lambda one: replace(one, rewards=(number,)))


def logprob(number: float) -> Poison:
    return on_first(lambda one: replace(one, logprobs=np.full(len(one.tokens), number, np.float32)))


def longer(by: int, mask: int) -> Poison:
    """Add tokens, either as an environment inserts them (`mask` 0) or as the policy's own."""

    def change(one: Completion) -> Completion:
        return replace(
            one,
            tokens=np.concatenate([one.tokens, np.ones(by, np.int32)]),
            logprobs=np.concatenate([one.logprobs, np.zeros(by, np.float32)]),
            mask=np.concatenate([one.mask, np.full(by, mask, np.uint8)]),
            spans=(*one.spans[:-1], TokenSpan(one.spans[-1].start, one.spans[-1].end + by, one.spans[-1].seq)),
        )

    return on_first(change)


def prompts(change: Callable[[Any], Any]) -> Poison:
    return lambda whole: replace(whole, prompts=tuple(np.asarray(change(prompt), np.int32) for prompt in whole.prompts))
