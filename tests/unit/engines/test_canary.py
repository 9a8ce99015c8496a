"""The canary compares log-probs of decoding with those of prompts, and reports servers whose graphs read old memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from completions_double import CompletionsDouble as Server

from deltawire.engines.vllm.driver.canary import PROMPTS, TOKENS, CanaryResult, check_decoding, check_recorded, generate
from deltawire.errors import DecodingDiffers, EngineError
from deltawire.format.digest import Digest
from deltawire.format.records.canary_records import CanaryRecord, RecordedTokens
from deltawire.format.records.record_parts import CommitRef


def test_a_sound_server_passes_with_prompts_that_no_cache_answers() -> None:
    server = Server()
    assert check_decoding(server) == CanaryResult(0, 0, TOKENS * len(PROMPTS))
    assert len(set(server.salts)) == 2
    check_decoding(server)
    assert len(set(server.salts)) == 4


@pytest.mark.parametrize("at", [0, TOKENS - 1])
def test_one_token_that_differs_is_found(at: int) -> None:
    with pytest.raises(DecodingDiffers, match=r"differ by up to 0\.55"):
        check_decoding(Server(0.55, at))
    assert check_decoding(Server(0.05, at)).largest == pytest.approx(0.05)


def test_a_small_difference_everywhere_is_found_by_the_mean() -> None:
    with pytest.raises(DecodingDiffers, match=r"differ by up to 0\.09, .* of 32 tokens: more than 0\.001 on average\."):
        check_decoding(Server(0.09), most_mean=0.001)


def test_a_server_whose_kernels_always_differ_is_compared_with_its_own_start() -> None:
    usual = check_decoding(Server(0.3), most_difference=float("inf"), most_mean=float("inf"))
    assert check_decoding(Server(0.8), usual=usual).largest == pytest.approx(0.8)
    with pytest.raises(DecodingDiffers, match=r"more than 0\.9 for one token"):
        check_decoding(Server(1.0), usual=usual)


def test_a_log_prob_that_is_not_a_number_is_found() -> None:
    with pytest.raises(DecodingDiffers):
        check_decoding(Server(float("nan")))


def choices(index: Any, tokens: list[int], logprobs: list[Any]) -> dict[str, Any]:
    """Return an answer for four prompts of eight tokens."""
    told = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length", "prompt_logprobs": [None] * 8}
    return {"choices": [{"index": index, **told}] * 4}


UNREADABLE = [{}, {"choices": []}, {"choices": [{"index": 0}] * 4}, {"choices": None}, None, []]
NONSENSE = [choices(float("inf"), [1], [-1.0]), choices(0, [1], [10**400]), choices(0, [], [])]


@pytest.mark.parametrize("answer", [*UNREADABLE, *NONSENSE])
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


def record_of(recorded: list[RecordedTokens]) -> CanaryRecord:
    record = CanaryRecord("0" * 32, "1" * 32, 1, CommitRef(3, "a" * 64, Digest()), tuple(recorded))
    return CanaryRecord.parse(record.to_bytes())


def test_a_server_that_computes_what_was_recorded_passes() -> None:
    result = check_recorded(Server(), record_of(generate(Server())))
    assert result.largest < 1e-6  # log-probs are recorded in millionths
    assert result.tokens == 2 * TOKENS * len(PROMPTS)


def test_decoding_that_differs_from_the_record_is_found() -> None:
    record = record_of(generate(Server()))
    with pytest.raises(DecodingDiffers, match=r"of decoding and the recorded ones differ by up to 0\.55"):
        check_recorded(Server(0.55), record)
    with pytest.raises(DecodingDiffers, match=r"of decoding and the recorded ones"):
        check_recorded(Server(float("nan")), record)


def test_weights_that_are_wrong_for_prompts_and_decoding_alike_are_found() -> None:
    server = Server()
    server.shift = -0.2
    check_decoding(server)
    with pytest.raises(DecodingDiffers):
        check_recorded(server, record_of(generate(Server())))


def test_prompts_that_differ_from_the_record_are_found_unless_that_is_usual() -> None:
    healthy = Server(0.3)
    usual = check_decoding(healthy, most_difference=float("inf"), most_mean=float("inf"))
    record = record_of(generate(healthy))
    assert check_recorded(healthy, record, usual=usual).largest == pytest.approx(0.3, abs=1e-5)
    with pytest.raises(DecodingDiffers, match="of prompts and the recorded ones"):
        check_recorded(healthy, record)


@pytest.mark.parametrize(("logprob", "passes"), [(-1.03, True), (-3.0, False)])
def test_another_token_is_accepted_only_if_it_is_as_probable_as_the_recorded_one(logprob: float, passes: bool) -> None:
    """The server continues another way from the third token on, so the tokens after it cannot be compared."""
    recorded = generate(Server())
    server = Server()
    complete = server.complete

    def other_way(body: Mapping[str, Any]) -> Any:
        answer = complete(body)
        for choice in answer["choices"]:
            if choice["logprobs"] is not None and choice["index"] == 1:
                choice["token_ids"][2:] = [200] * (TOKENS - 2)
                told = choice["logprobs"]["token_logprobs"]
                told[2:] = [recorded[1].logprobs[2] + logprob + 1.0, *([-9.0] * (TOKENS - 3))]
        return answer

    server.complete = other_way  # type: ignore[method-assign]
    if passes:
        assert check_recorded(server, record_of(recorded)).tokens == 2 * TOKENS * len(PROMPTS) - (TOKENS - 3)
    else:
        with pytest.raises(DecodingDiffers):
            check_recorded(server, record_of(recorded))
