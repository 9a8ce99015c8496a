"""Everything that changes what an engine draws is noticed, in a request and in the parameters that vLLM used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.engines.answer_table import AnswerTable
from deltawire.engines.sampling_changes import DEFAULTED, changed_by, not_named
from deltawire.engines.vllm.answer_recorder import _Recording

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CHANGES: list[dict[str, Any]] = [
    {"top_k": 1},
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": -100}},
    {"allowed_token_ids": [1, 2]},
    {"bad_words": ["w1"]},
    {"min_tokens": 1},
    {"thinking_token_budget": 5},
    {"response_format": {"type": "json_object"}},
    {"text": {"format": {"type": "json_schema", "schema": {}}}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_regex": "a+"},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    {"best_of": 2},
    {"vllm_xargs": {"mode": 1}},
]
NEUTRAL: list[dict[str, Any]] = [
    {},
    {"top_k": 0, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0},
    {"top_k": -1, "logit_bias": None, "allowed_token_ids": None, "bad_words": [], "response_format": {"type": "text"}},
    {"tools": [TOOL], "tool_choice": "auto", "best_of": 3, "n": 3, "temperature": 0.5, "top_p": 0.5, "stop": ["x"], "seed": 1},
]


@pytest.mark.parametrize("body", CHANGES, ids=lambda body: "-".join(body))
def test_a_parameter_that_changes_what_is_drawn_is_named(body: dict[str, Any]) -> None:
    assert changed_by({"model": "m", **body}) == list(body)


@pytest.mark.parametrize("body", NEUTRAL, ids=range(len(NEUTRAL)))
def test_parameters_that_change_nothing_are_not_named(body: dict[str, Any]) -> None:
    assert changed_by(body) == []


@pytest.mark.parametrize(
    ("prompt", "adapter", "reasons"),
    [
        ({"type": "token", "prompt_token_ids": [1]}, None, []),
        ({"prompt_token_ids": [1]}, None, []),
        ("a", None, []),
        ({"type": "multimodal", "prompt_token_ids": [1]}, None, ["images"]),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, None, ["images"]),
        ({"type": "embeds", "prompt_embeds": object()}, None, ["embeddings"]),
        ({"type": "token", "prompt_token_ids": [1]}, object(), ["LoRA"]),
    ],
)
def test_a_prompt_that_tokens_do_not_contain_and_an_adapter_are_named(prompt: Any, adapter: Any, reasons: list[str]) -> None:
    recording, params = _Recording("a", AnswerTable(), client()), SimpleNamespace(temperature=1.0, top_p=1.0, n=1)
    recording.begin("a-0", params, prompt, adapter)
    (call,) = recording._calls
    assert [reason in told for reason, told in zip(reasons, call["changed_by"], strict=True)] == [True] * len(reasons)


def test_parameters_without_a_number_may_have_a_default_of_the_engine() -> None:
    assert not_named({}) == list(DEFAULTED)
    assert not_named(dict.fromkeys(DEFAULTED, 0) | {"top_p": None, "top_k": True, "min_p": "0"}) == ["top_p", "top_k", "min_p"]


@pytest.mark.parametrize("value", [1e9, -1e9, 10**400, float("inf"), float("nan")])
def test_a_number_that_cannot_be_recorded_counts_as_not_named(value: float) -> None:
    assert not_named(dict.fromkeys(DEFAULTED, 1) | {"temperature": value}) == ["temperature"]


def client(*, watermark: Any = None, processors: Any = None) -> Any:
    model = SimpleNamespace(logprobs_mode="processed_logprobs", logits_processors=processors)
    return SimpleNamespace(model_config=model, vllm_config=SimpleNamespace(watermark_config=watermark))


def told(used: Any, parameters: Any) -> list[str]:
    """Return what the middleware says about the parameters of one call."""
    return _Recording("a", AnswerTable(), used).begin("a-0", parameters)._call["changed_by"]


def test_the_middleware_tells_what_vllm_really_used() -> None:
    vllm = pytest.importorskip("vllm.sampling_params", reason="vllm is not installed")
    make = vllm.SamplingParams
    assert told(client(), make.from_optional(temperature=0.5, top_p=0.5, seed=1, extra_args={"kv_transfer_params": {}})) == []
    for name, value in {
        "top_k": 5,  # from the request, or from the model's generation_config.json
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [1],
        "bad_words": ["w1"],
        "min_tokens": 1,
        "thinking_token_budget": 5,
        "structured_outputs": vllm.StructuredOutputsParams(json={"type": "object"}),
        "extra_args": {"mode": 1},
        "trace_decode_token_ids": [1, 2],
    }.items():
        assert told(client(), make.from_optional(**{name: value})) == [name]
    assert told(client(processors=["mine"]), make()) == ["logits_processors"]
    assert told(client(watermark="key"), make()) == ["watermarking"]
    assert told(client(watermark="key"), make(watermarking=False)) == []
    assert told(client(), make(watermarking=True)) == []
