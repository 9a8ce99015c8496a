"""What makes completions for a member of the fleet, whatever engine it is made of.

`deltawire.rl.generation.TransformersGenerator` is a model in this process, `deltawire.engines.vllm.generation.VllmGenerator` a server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..chain.version import Version
from ..format.records.fleet_files import Row
from ..format.records.trainer_records import Sampling

Stop: TypeAlias = Callable[[], bool]
"""Asked now and then whether to stop."""


def never() -> bool:
    """Do not stop."""
    return False


class Interrupted(Exception):
    """Generation ended because `stop` said so. What was made until then is given up."""


@dataclass(frozen=True, slots=True)
class GeneratedSpan:
    """Tokens `start` to `end` (exclusive) of a completion were made by one version."""

    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: its tokens, each with the log-prob under the distribution that it was drawn from, and the versions that made them.

    `finished` says that it ended of its own accord, not at the limit of tokens.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[GeneratedSpan, ...]
    finished: bool


class Generator(Protocol):
    """An engine that follows the chain by itself, in the background, and completes prompts with what it has.

    Every method but `generate` returns soon. `generate` runs on one thread at a time.
    """

    def start(self) -> None:
        """Begin to follow the chain. Errors that heal by themselves are never raised, here or later; they only mean an older version."""

    @property
    def version(self) -> Version | None:
        """The version that completions would be made by now; None while there is none, or nobody knows."""

    @property
    def problem(self) -> Exception | None:
        """Why it is not at a newer version, or cannot go on at all (an error that is not `retryable`); None if nothing is wrong."""

    def encode(self, rows: Sequence[Row]) -> list[list[int]]:
        """The prompts of rows as token ids; "prompt" is text, or a list of messages (TRL's convention). `EngineError` for one without."""

    def decode(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Completions as rewards see them (TRL's convention): text for prompts that are text, else a list with the assistant's message."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        """`sampling.samples` completions of each prompt, those of the first prompt first.

        `Interrupted` soon after `stop` says so. `EngineUnavailable` (retryable) if there is no version, or it was lost on the way.
        """

    def close(self) -> None:
        """Let go of engine and chain. May be called twice."""
