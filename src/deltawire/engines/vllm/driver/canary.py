"""A check of what a server computes after an update, which no digest of its memory can show.

CUDA graphs of the decoding steps hold addresses. If a tensor moved, they continue to read the old memory, while prompts are computed
without these graphs from the new memory. So the server generates some tokens, which uses the graphs, and then gets the same tokens as
prompts. The log-probs of both must agree, up to the rounding of different kernels. They can also be compared with those that a healthy
server had with the same version (deltawire/chain/records/canaries.py). server_canary.py makes these checks after updates.
"""

from __future__ import annotations

import math
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ....errors import DecodingDiffers, EngineError
from ....format.records.canary_records import CanaryRecord, RecordedTokens
from .token_route import read_choice

PROMPTS = tuple(tuple(range(first, first + 8)) for first in (1, 5, 9, 17))
"""Token ids that every vocabulary has. Their meaning has no effect on the check."""
TOKENS = 8
"""The number of tokens that continue each prompt."""
MOST_DIFFERENCE = 0.1
"""The largest difference of two log-probs of one token that different kernels may cause."""
MOST_MEAN = 0.02
"""The largest mean of all differences."""
_TIMES = 3
RECORD_HINT = (
    f"{DecodingDiffers.hint.removesuffix('.')}. Or the record is wrong: record it again on a healthy server with "
    "`deltawire canary --replace`, and restart the sidecar."
)


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


UNKNOWN_USUAL = CanaryResult(largest=0.0942, mean=0.0459, tokens=32)
"""Assumed if nobody has measured the usual differences of a server: those of a healthy one with 8.2 B bf16 weights on an H200.

Kernels for a few tokens add in another order than those for prompts. vLLM computes logits in the model's type, and a bf16 logit between 4
and 8 has steps of 1/32, so a log-prob often moves by one to three of them. That is more than `MOST_MEAN`, although nothing is wrong."""


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
    most_difference, most_mean = _widened(most_difference, most_mean, usual)
    decoded = generate(server, prompts, tokens)
    differences = [
        abs(one - other)
        for each, told in zip(decoded, _prompt_logprobs(server, decoded), strict=True)
        for one, other in zip(each.logprobs, told, strict=True)
    ]
    return _judge("log-probs of decoding and of prompts", differences, most_difference, most_mean)


def generate(server: Completions, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = TOKENS) -> list[RecordedTokens]:
    """Return the most probable tokens that continue each prompt, with their log-probs.

    Raises `EngineError` if an answer cannot be read, and the errors of the server's routes.

    Parameters
    ----------
    server
        The server, which must not be paused.
    prompts
        The token ids of each prompt.
    tokens
        The number of tokens that continue each prompt.
    """
    choices = [read_choice(choice) for choice in _choices(server, prompts, {"max_tokens": tokens, "logprobs": 0})]
    return [
        RecordedTokens(tuple(prompt), tuple(found.tokens), tuple(found.logprobs)) for prompt, found in zip(prompts, choices, strict=True)
    ]


def check_recorded(server: Completions, record: CanaryRecord, *, usual: CanaryResult | None = None) -> CanaryResult:
    """Compare what a running server computes with what a healthy one computed with the same version.

    The server generates, and also gets the recorded tokens as prompts. Another GPU may choose another token if two are equally probable,
    so log-probs of a completion are compared up to the first token that differs.

    Raises the same errors as `check_decoding`.

    Parameters
    ----------
    server
        The server, which must not be paused.
    record
        The record of the version that the server has.
    usual
        As for `check_decoding`.
    """
    prompts, longest = [each.prompt for each in record.recorded], max(len(each.tokens) for each in record.recorded)
    differences: list[float] = []
    for made, healthy in zip(generate(server, prompts, longest), record.recorded, strict=True):
        for token, logprob, expected, usually in zip(made.tokens, made.logprobs, healthy.tokens, healthy.logprobs, strict=False):
            differences.append(abs(logprob - usually))
            if token != expected:
                break
    result = _judge("log-probs of decoding and the recorded ones", differences, MOST_DIFFERENCE, MOST_MEAN, RECORD_HINT)
    differences = [
        abs(one - other)
        for each, told in zip(record.recorded, _prompt_logprobs(server, record.recorded), strict=True)
        for one, other in zip(each.logprobs, told, strict=True)
    ]
    of_prompts = _judge(
        "log-probs of prompts and the recorded ones", differences, *_widened(MOST_DIFFERENCE, MOST_MEAN, usual), RECORD_HINT
    )
    tokens = result.tokens + of_prompts.tokens
    mean = (result.mean * result.tokens + of_prompts.mean * of_prompts.tokens) / tokens
    return CanaryResult(max(result.largest, of_prompts.largest), mean, tokens)


def _widened(most_difference: float, most_mean: float, usual: CanaryResult | None) -> tuple[float, float]:
    if usual is None:
        return most_difference, most_mean
    return max(most_difference, _TIMES * usual.largest), max(most_mean, _TIMES * usual.mean)


def _judge(what: str, differences: Sequence[float], most_difference: float, most_mean: float, hint: str | None = None) -> CanaryResult:
    """Return the result. Raises `DecodingDiffers` if the differences are too large or not numbers, and `EngineError` if there are none."""
    if not differences:
        raise EngineError("the vLLM server has generated no tokens.")
    # `max` and comparisons give no useful result for values that are not numbers, so these count as infinite.
    known = [math.inf if math.isnan(each) else each for each in differences]
    result = CanaryResult(max(known), statistics.fmean(known), len(known))
    broken = [f"more than {most_difference:.3g} for one token"] if math.isinf(result.largest) or result.largest > most_difference else []
    broken += [f"more than {most_mean:.3g} on average"] if result.mean > most_mean else []
    if broken:
        raise DecodingDiffers(
            f"{what} differ by up to {result.largest:.3g}, and by {result.mean:.3g} on average of {result.tokens} tokens: "
            f"{' and '.join(broken)}.",
            hint=hint,
        )
    return result


def _choices(server: Completions, prompts: Sequence[Sequence[int]], more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the most probable continuation of each prompt."""
    body = {
        "model": server.model(),
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
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the answer of the vLLM server cannot be read: {error!r}.") from error
    if len(found) != len(prompts):
        raise EngineError(f"the vLLM server answered {len(found)} of {len(prompts)} prompts.")
    return found


def _prompt_logprobs(server: Completions, recorded: Sequence[RecordedTokens]) -> list[list[float]]:
    """Return the log-probs that the server computes for tokens if they are part of the prompt."""
    whole = [[*each.prompt, *each.tokens] for each in recorded]
    choices = _choices(server, whole, {"max_tokens": 1, "prompt_logprobs": 0})
    try:
        return [
            [
                float(told[str(token)]["logprob"])
                for told, token in zip(choice["prompt_logprobs"][len(each.prompt) :], each.tokens, strict=True)
            ]
            for choice, each in zip(choices, recorded, strict=True)
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the log-probs of a prompt cannot be read: {error!r}.") from error
