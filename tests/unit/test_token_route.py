"""Test what a client reads from vLLM's route that tells which weights made which token, and which answers it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.engines.vllm.driver.token_route import LabelledSpan, read_choice, token_request
from deltawire.errors import EngineError, EngineUnavailable


def choice(**changes: Any) -> dict[str, Any]:
    spans = [{"start": 0, "end": 2, "version": "7"}, {"start": 2, "end": 3, "version": "9"}]
    told = {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -0.25}]}
    return {"token_ids": [4, 5, 6], "logprobs": told, "finish_reason": "stop", "weight_versions": spans, **changes}


def test_every_token_gets_the_label_of_its_span() -> None:
    drawn = read_choice(choice())
    assert drawn.tokens == [4, 5, 6]
    assert drawn.logprobs == [-0.5, -1.0, -0.25]
    assert drawn.spans == (LabelledSpan(0, 2, "7"), LabelledSpan(2, 3, "9"))
    assert drawn.labels() == ["7", "7", "9"]
    assert drawn.finished


def test_an_answer_of_the_older_route_is_read_without_labels() -> None:
    drawn = read_choice(choice(logprobs={"token_logprobs": [-1, -2, -3]}, weight_versions=None, finish_reason="length"))
    assert drawn.logprobs == [-1.0, -2.0, -3.0]
    assert drawn.spans is None
    assert not drawn.finished


def test_a_completion_without_tokens_has_no_spans() -> None:
    assert read_choice(choice(token_ids=[], logprobs={"content": []}, weight_versions=[])).labels() == []


@pytest.mark.parametrize("changes", [{"finish_reason": "abort"}, {"logprobs": {"content": []}}])
def test_a_completion_that_was_cut_short_may_be_asked_for_again(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        read_choice(choice(**changes))


@pytest.mark.parametrize(
    "spans",
    [
        [{"start": 0, "end": 2, "version": "7"}],
        [{"start": 0, "end": 4, "version": "7"}],
        [{"start": 1, "end": 3, "version": "7"}],
        [{"start": 0, "end": 2, "version": "7"}, {"start": 1, "end": 3, "version": "9"}],
        [{"start": 0, "end": 3}],
        ["7"],
    ],
)
def test_spans_that_do_not_cover_each_token_once_are_an_error(spans: list[Any]) -> None:
    with pytest.raises(EngineError):
        read_choice(choice(weight_versions=spans))


def test_log_probs_are_always_asked_for() -> None:
    assert token_request("m", (1, 2), {"n": 1}) == {"model": "m", "token_ids": [1, 2], "sampling_params": {"n": 1, "logprobs": 0}}
