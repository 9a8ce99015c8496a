"""The requests and answers of the vLLM route that tells which weights made which token. This module does no input or output.

vLLM labels every token with the name of the weights that made it. `POST /inference/v1/generate` returns these labels as spans; the server
has that route only with `--enable-scale-out`. Weights change only while the server is paused, so the spans are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import EngineError, EngineUnavailable

TOKEN_ROUTE = "/inference/v1/generate"
NEEDED_FLAG = "--enable-scale-out"


@dataclass(frozen=True, slots=True)
class LabelledSpan:
    """The tokens from `start` to `end` (exclusive) were made by the weights with this label."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """One completion. `spans` cover all of its tokens, in order. They are None if the server does not report them."""

    tokens: list[int]
    logprobs: list[float]
    spans: tuple[LabelledSpan, ...] | None
    finished: bool
    """Whether the model ended it. False if it reached the limit of tokens."""
    experts: Any = None
    """The routed experts as the server sends them (`engines.routed_experts` reads them). None if it does not."""

    def labels(self) -> list[str]:
        """Return the label of each token."""
        assert self.spans is not None
        return [span.label for span in self.spans for _ in range(span.start, span.end)]


def token_request(model: str | None, prompt: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request to `TOKEN_ROUTE`. `sampling` has the fields of vLLM's sampling parameters."""
    return {"model": model, "token_ids": list(prompt), "sampling_params": {**sampling, "logprobs": 0}}


def read_choice(choice: Mapping[str, Any]) -> LabelledTokens:
    """Read one choice of an answer. Answers of /v1/completions with `return_token_ids` and `logprobs` are read too.

    Raises `EngineUnavailable` if the completion ended early, and `EngineError` if the answer cannot be read.
    """
    try:
        tokens = [int(token) for token in choice["token_ids"]]
        told, reason = choice["logprobs"], choice["finish_reason"]
        logprobs = [float(each["logprob"]) for each in told["content"]] if "content" in told else list(map(float, told["token_logprobs"]))
        found = choice.get("weight_versions")
        spans = None if found is None else tuple(LabelledSpan(int(one["start"]), int(one["end"]), str(one["version"])) for one in found)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the answer of the vLLM server cannot be read: {error!r}.") from error
    if len(logprobs) != len(tokens) or reason not in ("stop", "length"):
        raise EngineUnavailable(f"the vLLM server ended a completion early ({reason}).")
    if spans is not None:
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges != sorted(edges) or edges[-1] != len(tokens):
            raise EngineError("the vLLM server does not report the weights of every token.")
    return LabelledTokens(tokens, logprobs, spans, reason == "stop", choice.get("routed_experts"))
