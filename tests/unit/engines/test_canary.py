"""The canary compares log-probs of decoding with those of prompts, and reports servers whose graphs read old memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deltawire.engines.vllm.driver.canary import PROMPTS, TOKENS, CanaryResult, check_decoding
from deltawire.errors import DecodingDiffers, EngineError


class Server:
    """Answers as vLLM does. The token after each token is the sum of the two before it. `stale` is added to the log-probs of decoding."""

    def __init__(self, stale: float = 0.0, at: int = 0) -> None:
        self._stale = stale
        self._at = at
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
            stale = [self._stale if index == 2 and place == self._at else 0.0 for place in range(TOKENS)]
            choice["logprobs"] = {"token_logprobs": [self._logprob(token) + off for token, off in zip(tokens[length:], stale, strict=True)]}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": self._logprob(token)}} for token in tokens[1:length])]
        return choice

    def _logprob(self, token: int) -> float:
        return -1 - token / 256


def test_a_sound_server_passes_with_prompts_that_no_cache_answers() -> None:
    server = Server()
    assert check_decoding(server) == CanaryResult(0, 0, TOKENS * len(PROMPTS))
    assert len(set(server.salts)) == 2
    check_decoding(server)
    assert len(set(server.salts)) == 4


@pytest.mark.parametrize("at", [0, TOKENS - 1])
def test_one_token_that_differs_is_found(at: int) -> None:
    with pytest.raises(DecodingDiffers, match=r"differ by 0\.55"):
        check_decoding(Server(0.55, at))
    assert check_decoding(Server(0.05, at)).largest == pytest.approx(0.05)


def test_a_small_difference_everywhere_is_found_by_the_mean() -> None:
    with pytest.raises(DecodingDiffers):
        check_decoding(Server(0.09), most_mean=0.001)


def test_a_server_whose_kernels_always_differ_is_compared_with_its_own_start() -> None:
    usual = check_decoding(Server(0.3), most_difference=float("inf"), most_mean=float("inf"))
    assert check_decoding(Server(0.8), usual=usual).largest == pytest.approx(0.8)
    with pytest.raises(DecodingDiffers, match=r"more than 0\.9 "):
        check_decoding(Server(1.0), usual=usual)


def test_a_log_prob_that_is_not_a_number_is_found() -> None:
    with pytest.raises(DecodingDiffers):
        check_decoding(Server(float("nan")))


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"index": 0}] * 4}, {"choices": None}, None, []])
def test_an_answer_that_cannot_be_read_is_an_error(answer: Any) -> None:
    server = Server()
    server.complete = lambda body: answer  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        check_decoding(server)


def test_log_probs_of_other_tokens_are_an_error() -> None:
    server = Server()
    complete = server.complete

    def without_prompt(body: Mapping[str, Any]) -> Any:
        answer = complete(body)
        for choice in answer["choices"]:
            choice["prompt_logprobs"] = [None, *([{"7": {"logprob": -1.0}}] * 15)]
        return answer

    server.complete = without_prompt  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="log-probs of a prompt"):
        check_decoding(server)
