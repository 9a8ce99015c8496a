"""The interface that an engine must offer so that a member of the fleet can make completions with it.

`deltawire.rl.generation.TransformersGenerator` runs a model in this process.
`deltawire.engines.vllm.driver.generation.VllmGenerator` asks a server.
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
from ..format.routing import RecordedExperts

Stop: TypeAlias = Callable[[], bool]
"""Called now and then during generation. It returns true when generation must stop."""


def never() -> bool:
    """Return False: generation does not stop."""
    return False


class Interrupted(Exception):
    """Generation ended because `stop` returned true. The tokens made until then are lost."""


@dataclass(frozen=True, slots=True)
class GeneratedSpan:
    """A span of tokens of a completion that one version made.

    Parameters
    ----------
    start
        The index of its first token.
    end
        The index after its last token.
    version
        The version that made the tokens.
    """

    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion.

    Parameters
    ----------
    tokens
        The token ids.
    logprobs
        The log-prob of each token under the distribution that it was drawn from.
    spans
        The versions that made the tokens, from the first token to the last.
    finished
        Whether the completion ended by itself, and not at the limit of tokens.
    routing
        The experts that processed the tokens; None if the engine did not record them.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[GeneratedSpan, ...]
    finished: bool
    routing: RecordedExperts | None = None


class Generator(Protocol):
    """An engine that follows the chain in the background, and completes prompts with the version that it has.

    Every method except `generate` returns soon. `generate` runs on one thread at a time.
    """

    def start(self) -> None:
        """Begin to follow the chain.

        Retryable errors are never raised, here or later: the engine keeps an older version meanwhile.
        """

    @property
    def version(self) -> Version | None:
        """The version that would make completions now; None while there is none, or while it is unknown."""

    @property
    def problem(self) -> Exception | None:
        """Why the engine has no newer version. An error that is not `retryable` means that it cannot continue. None if nothing is wrong."""

    def encode(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the prompts of rows as token ids. Raise `EngineError` for a row without a prompt.

        Parameters
        ----------
        rows
            Rows of a dataset. The column "prompt" is text or a list of messages, by TRL's convention.
        """

    def decode(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Return completions as reward functions get them, by TRL's convention.

        For a prompt that is text, that is text; for a list of messages, a list with the assistant's message.

        Parameters
        ----------
        rows
            The row of each completion.
        tokens
            The token ids of each completion.
        """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        """Return `sampling.samples` completions of each prompt, those of the first prompt first.

        Raise `EngineUnavailable` (retryable) if the engine has no version, or loses it meanwhile.

        Parameters
        ----------
        prompts
            The token ids of each prompt.
        sampling
            How completions are drawn.
        stop
            Called now and then. `Interrupted` is raised soon after it returns true.
        """

    def close(self) -> None:
        """Release the engine and the chain. May be called twice."""
