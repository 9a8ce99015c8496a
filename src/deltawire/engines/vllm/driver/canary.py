"""A check of what a server computes after an update, which no digest of its memory can show.

CUDA graphs of the decoding steps hold addresses. If a tensor moved, they go on reading the old memory, while prompts are computed without
these graphs from the new memory. So the server generates some tokens, which uses the graphs, and then gets the same tokens as prompts. The
log-probs of both must agree, up to the rounding of different kernels.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ....errors import DecodingDiffers, EngineError
from .token_route import LabelledTokens, read_choice

PROMPTS = tuple(tuple(range(first, first + 8)) for first in (1, 5, 9, 17))
"""Token ids that every vocabulary has. What they mean has no effect on the check."""
TOKENS = 8
"""The number of tokens that continue each prompt."""
MOST_DIFFERENCE = 0.1
"""The largest difference of two log-probs of one token that different kernels may cause."""
MOST_MEAN = 0.02
"""The largest mean of all differences."""
_TIMES = 3


class Completions(Protocol):
    """A server that answers requests. `VllmRoutes` is one."""

    def model(self) -> str: ...

    def complete(self, body: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The amount by which the log-probs of decoding and of prompts differ.

    Parameters
    ----------
    largest
        The largest difference of one token.
    mean
        The mean over all tokens.
    tokens
        The number of tokens that were compared.
    """

    largest: float
    mean: float
    tokens: int


def check_decoding(
    server: Completions,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    tokens: int = TOKENS,
    most_difference: float = MOST_DIFFERENCE,
    most_mean: float = MOST_MEAN,
    usual: CanaryResult | None = None,
) -> CanaryResult:
    """Compare what a running server computes while it decodes with what it computes for prompts.

    It sends two requests. Neither uses blocks of the KV cache that were computed before. The server's weights must not change meanwhile.

    Raises `DecodingDiffers` if the log-probs differ too much, `EngineError` if an answer cannot be read, and the errors of the server's
    routes.

    Parameters
    ----------
    server
        The server, which must not be paused.
    prompts
        The token ids of each prompt.
    tokens
        The number of tokens that continue each prompt.
    most_difference
        The largest difference of two log-probs of one token that is accepted.
    most_mean
        The largest mean of all differences that is accepted.
    usual
        The result of this check when the server had just started. Some models and kernels differ more than others (MLA computes decoding
        in another way than prompts), so up to three times these differences are accepted too.
    """
    if usual is not None:
        most_difference, most_mean = max(most_difference, _TIMES * usual.largest), max(most_mean, _TIMES * usual.mean)
    model = server.model()
    decoded = [read_choice(choice) for choice in _choices(server, model, prompts, {"max_tokens": tokens, "logprobs": 0})]
    whole = [[*prompt, *found.tokens] for prompt, found in zip(prompts, decoded, strict=True)]
    read = _choices(server, model, whole, {"max_tokens": 1, "prompt_logprobs": 0})
    differences = [
        abs(one - other)
        for prompt, found, choice in zip(prompts, decoded, read, strict=True)
        for one, other in zip(found.logprobs, _prompt_logprobs(choice, len(prompt), found), strict=True)
    ]
    result = CanaryResult(max(differences), statistics.fmean(differences), len(differences))
    if not (result.largest <= most_difference and result.mean <= most_mean):  # also if one is not a number
        raise DecodingDiffers(
            f"log-probs of decoding and of prompts differ by {result.largest:.3g} (mean {result.mean:.3g} of {result.tokens} tokens), "
            f"more than {most_difference:.3g} (mean {most_mean:.3g})."
        )
    return result


def _choices(server: Completions, model: str, prompts: Sequence[Sequence[int]], more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the most probable continuation of each prompt."""
    body = {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
        **more,
    }
    answer = server.complete(body)
    try:
        found = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the answer of the vLLM server cannot be read: {error!r}.") from error
    if len(found) != len(prompts):
        raise EngineError(f"the vLLM server answered {len(found)} of {len(prompts)} prompts.")
    return found


def _prompt_logprobs(choice: Mapping[str, Any], start: int, found: LabelledTokens) -> list[float]:
    """Return the log-probs of the tokens that were decoded before, which begin at `start` in this prompt."""
    try:
        told = choice["prompt_logprobs"][start:]
        return [float(each[str(token)]["logprob"]) for each, token in zip(told, found.tokens, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the log-probs of a prompt cannot be read: {error!r}.") from error
