"""A double of a vLLM server's route for completions, with log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltawire.engines.vllm.driver.canary import TOKENS


class CompletionsDouble:
    """Answers as vLLM does. The token after each token is the sum of the two before it.

    `stale` is added to a log-prob of decoding, `shift` to all log-probs.
    """

    def __init__(self, stale: float = 0.0, at: int = 0) -> None:
        self.stale = stale
        self._at = at
        self.shift = 0.0
        self.salts: list[str] = []

    def model(self) -> str:
        return "tiny"

    def complete(self, body: Mapping[str, Any]) -> Any:
        assert body["temperature"] == 0
        self.salts.append(body["cache_salt"])
        choices = [self._choice(number, list(prompt), body) for number, prompt in enumerate(body["prompt"])]
        return {"choices": choices[::-1]}  # their order is not defined

    def _choice(self, index: int, tokens: list[int], body: Mapping[str, Any]) -> dict[str, Any]:
        length = len(tokens)
        for _ in range(body["max_tokens"]):
            tokens.append((tokens[-1] + tokens[-2]) % 256)
        choice: dict[str, Any] = {"index": index, "token_ids": tokens[length:], "finish_reason": "length", "logprobs": None}
        if "logprobs" in body:
            stale = [self.stale if index == 2 and place == self._at else 0.0 for place in range(TOKENS)]
            choice["logprobs"] = {"token_logprobs": [self._logprob(token) + off for token, off in zip(tokens[length:], stale, strict=True)]}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": self._logprob(token)}} for token in tokens[1:length])]
        return choice

    def _logprob(self, token: int) -> float:
        return -1 - token / 256 + self.shift
