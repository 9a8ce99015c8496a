"""Only what was drawn as training assumes, and what a user's function lets through, may be trained on. The rest keeps no secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_scene import Scene, gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.engines.sampling_changes import DEFAULTED
from deltawire.format.interactions import AnswerFacts
from deltawire.gateway.http.api_keys import Caller
from deltawire.gateway.http.requests import AskedFor, read_request
from deltawire.gateway.recording.answer_text import is_all_text, read_answer, request_messages
from deltawire.gateway.recording.answers import Unusable, intent_of, row_of
from deltawire.gateway.recording.inline_answers import InlineAnswer
from deltawire.store import Store
from deltawire.store.live_keys import INTERACTIONS

DRAW = {"seed": 3, "max_tokens": 5, "temperature": 1.0}
"""Two answers to the same question have the same tokens."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def parts(scene: Scene) -> dict[tuple[str, int], tuple[Any, list[int], Any]]:
    """Return each interaction with its prompt and its completion."""
    return {
        (one.id, one.choice): (one, file.rollouts.prompts[made.prompt].tolist(), made)
        for file in scene.interactions()
        for one, made in zip(file.interactions, file.rollouts.completions, strict=True)
    }


def recorded(scene: Scene, content: str = "w5 w1", **fields: Any) -> list[tuple[Any, list[int], Any]]:
    """Ask, and return what the store then has of each choice of the answer."""
    name = scene.chat(content, **{**DRAW, **fields})[2]["x-deltawire-inference-id"]
    scene.wait_for(name)
    return [one for (each, _), one in sorted(parts(scene).items()) if each == name]


def packed(tokens: Any) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def rule(shown: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hide w5 in the question, and do what tags say."""
    messages = [{**each, "content": each["content"].replace("w5", "…")} for each in shown["messages"]]
    wanted = {name: value == "yes" for name, value in shown["tags"].items() if name == "tokens"}
    return {**shown, "messages": messages, "tags": {}, **wanted}


def changing_its_argument(shown: Any) -> Any:
    shown["messages"][0]["content"] = shown["messages"][0]["content"].replace("w5", "…")
    return shown


def hiding_one_answer(shown: Any) -> Any:
    hiding_one_answer.calls += 1
    return {**shown, "answer": "…"} if hiding_one_answer.calls == 1 else shown


@pytest.mark.parametrize("text", [True, False], ids=["text", "no text"])
@pytest.mark.parametrize("redact", [rule, changing_its_argument])
def test_what_a_function_hides_is_not_in_the_tokens_either(text: bool, redact: Any, engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, name="plain") as scene:
        ((one, prompt, made),) = recorded(scene)
        assert one.train
        secrets = [packed(prompt), packed(made.tokens), np.asarray(made.logprobs, "<f4").tobytes()]
        assert all(any(secret in store.get(info.key, limit=1 << 26) for info in store.list(INTERACTIONS)) for secret in secrets)
    with gateway(store, tmp_path, engine, name="hiding", redact=redact, text=text) as scene:
        ((hidden, told, drawn),) = recorded(scene)
        assert (hidden.train, told) == (False, [0])
        assert (hidden.facts.length, len(drawn.tokens), drawn.spans) == (len(made.tokens), len(made.tokens), made.spans)
        assert not drawn.tokens.any()
        assert not drawn.logprobs.any()
        assert not drawn.mask.any()
        assert (hidden.text is not None) == text
        files = [store.get(info.key, limit=1 << 26) for info in store.list(INTERACTIONS) if "/hiding." in info.key]
        assert files
        assert not any(secret in data for data in files for secret in (*secrets, b"w5 w1"))
        (event,) = [event for event in scene.events if event.name == "interaction-untrained"]
        assert "redaction" in event.fields["reason"]
        ((shown, told, drawn),) = recorded(scene, "w1")  # nothing is hidden here
        assert (shown.train, drawn.mask.all()) == (True, True)


def test_a_function_may_keep_or_withhold_tokens(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, redact=rule) as scene:
        for content, tags, fields, keeps in (
            ("w5 w1", {"tokens": "yes"}, {}, True),
            ("w1", {"tokens": "no"}, {}, False),
            ("w1", {}, {"tools": TOOLS}, False),  # the function does not see the tools, which are a part of the prompt
            ("w1", {"tokens": "yes"}, {"tools": TOOLS}, True),
        ):
            name = scene.chat(content, {"x-deltawire-tags": json.dumps(tags)}, **DRAW, **fields)[2]["x-deltawire-inference-id"]
            scene.wait_for(name)
            one, prompt, made = parts(scene)[name, 0]
            assert (one.train, bool(made.mask.all()), prompt != [0]) == (keeps, keeps, keeps), (content, tags)


def test_a_function_decides_which_model_is_recorded() -> None:
    asked = asked_for({"model": "alice@example.com", "messages": [{"role": "user", "content": "a"}]})
    intent = intent_of(asked, engine="http://e", seq=3, channel=None, user=None)
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    calls, copy = [{"prompt_token_ids": [1], "choices": [choice]}], b'{"choices": [{"index": 0, "message": {"content": "b"}}]}'

    def recorded_model(redact: Any) -> str:
        (one,) = row_of(intent, calls, logprobs=None, oldest=3, asked=asked, copies=[copy], redact=redact)["interactions"]
        return str(one["model"])

    assert recorded_model(lambda shown: shown) == "alice@example.com"
    assert recorded_model(lambda shown: {**shown, "model": "hidden"}) == "hidden"
    assert recorded_model(lambda shown: {**shown, "model": "a\nb" + "c" * 300}) == "a?b" + "c" * 197
    assert recorded_model(lambda shown: {name: value for name, value in shown.items() if name != "model"}) == "-"


def test_each_completion_of_a_request_keeps_its_own_tokens(engine: str, store: Store, tmp_path: Path) -> None:
    hiding_one_answer.calls = 0
    with gateway(store, tmp_path, engine, redact=hiding_one_answer) as scene:
        first, second = recorded(scene, n=2)
        assert (first[0].train, first[1], first[2].tokens.any()) == (False, [0], False)
        assert (second[0].train, len(second[1]) > 1, second[2].mask.all()) == (True, True, True)


def asked_for(body: dict[str, Any]) -> AskedFor:
    return read_request("chat", body, {}, Caller(), consent=True)


def inline_row(body: dict[str, Any], **told: Any) -> tuple[bool, list[str]]:
    """Return whether an answer that tells its tokens may be trained on, and the reasons why not."""
    asked, reasons = asked_for(body), list[str]()
    intent = intent_of(asked, engine="http://e", seq=3, channel=None, user=None)
    inline = InlineAnswer(asked)
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}}
    inline.take({"prompt_token_ids": [1, 2], "choices": [choice]})
    calls = [{**call, **told} for call in inline.calls()]
    row = row_of(json.loads(json.dumps(intent)), calls, logprobs="processed_logprobs", oldest=3, on_untrained=reasons.append)
    (one,) = row["interactions"]
    return bool(one["train"]), reasons


WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("missing", [None, *DEFAULTED])
def test_an_answer_of_unknown_defaults_is_trained_on_only_if_its_request_names_everything(missing: str | None) -> None:
    train, reasons = inline_row({name: value for name, value in WHOLE.items() if name != missing})
    assert train == (missing is None)
    assert [missing in reason for reason in reasons] == ([] if missing is None else [True])


@pytest.mark.parametrize(
    "change",
    [{"top_k": 1}, {"logit_bias": {"5": 1}}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"min_tokens": 2}],
    ids=lambda change: "".join(change),
)
def test_an_answer_that_was_drawn_otherwise_is_not_trained_on(change: dict[str, Any]) -> None:
    train, (reason,) = inline_row({**WHOLE, **change})
    assert not train
    assert next(iter(change)) in reason
    assert inline_row({**WHOLE, **change}, changed_by=[]) == (True, [])  # the engine knows better


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": [TEXT]}]}, None),
        ({"messages": [{"role": "user", "content": [{"text": "a"}, "b"]}]}, None),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "a"}]}, None),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, None),
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"image_url": "data:"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "input_audio"),
        ({"messages": [{"role": "user", "content": [7]}]}, "unknown"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input_image"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_file", "file_id": "a"}]}]}, "input_file"),
        ({"prompt": "a", "prompt_embeds": "b"}, "prompt_embeds"),
    ],
)
def test_an_answer_to_more_than_tokens_is_not_trained_on(body: dict[str, Any], kind: str | None) -> None:
    train, reasons = inline_row({**WHOLE, **body}, changed_by=[])  # even if the engine, with an older middleware, tells of no change
    assert train == (kind is None)
    assert [kind in reason for reason in reasons] == ([] if kind is None else [True])


def test_an_engine_that_tells_what_it_used_is_believed(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url) as scene:
        assert [one.train for one, _, _ in recorded(scene)] == [True]
        engine.sampling["changed_by"] = ["top_k"]  # of its own defaults: the request does not name it
        assert [one.train for one, _, _ in recorded(scene)] == [False]
        assert [one.train for one, _, _ in recorded(scene)] == [False]
        (event,) = [event for event in scene.events if event.name == "interaction-untrained"]  # each reason is told once
        assert "top_k" in event.fields["reason"]
        del engine.sampling["changed_by"]  # an older engine does not tell
        assert [one.train for one, _, _ in recorded(scene)] == [False]
        assert [one.train for one, _, _ in recorded(scene, **WHOLE)] == [True]


def test_the_small_server_uses_nothing_but_temperature_and_top_p(scene: Scene) -> None:
    assert [one.train for one, _, _ in recorded(scene, top_k=1, logit_bias={"5": 1})] == [True]


@pytest.mark.parametrize(
    ("body", "is_text"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, False),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, False),
        ({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}, False),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, False),
        ({"messages": []}, False),
        ({"input": "a"}, True),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, True),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, False),
        ({"input": "a", "instructions": "b"}, False),
        ({"input": "a", "previous_response_id": "b"}, False),
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2]}, False),
        ({"prompt": ["a", [1]]}, True),
        ({"prompt": "a", "include_reasoning": True}, True),
        ({"prompt": "a", "include_reasoning": False}, False),
        ({"prompt": "a", "include_reasoning": "false"}, False),
        ({"prompt": "a", "stop": None, "stop_token_ids": []}, True),
        ({"prompt": "a", "stop": ["w5"]}, False),
        ({"prompt": "a", "stop": "w", "include_stop_str_in_output": True}, False),  # its last token may have more than the stop text
        ({"prompt": "a", "stop_token_ids": [5]}, False),
    ],
)
def test_a_function_is_trusted_with_tokens_only_if_it_sees_their_whole_text(body: dict[str, Any], is_text: bool) -> None:
    assert is_all_text(body) == is_text


def test_each_prompt_of_a_request_is_shown_with_its_own_answer() -> None:
    body = {"prompt": ["a", "b", [1]]}
    assert [request_messages(body, number) for number in range(2)] == [[("user", "a")], [("user", "b")]]
    assert [is_all_text(body, number) for number in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("message", "has_more"),
    [
        ({"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}, False),
        ({"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, True),
        ({"content": "a", "reasoning": "b"}, True),
        ({"content": None, "refusal": "b"}, True),
        ({"content": [{"type": "text", "text": "a"}]}, False),
        ({"content": [{"type": "text", "text": "a"}, {"type": "audio", "data": "b"}]}, True),
    ],
)
def test_what_the_model_wrote_besides_its_text_is_noticed(message: dict[str, Any], has_more: bool) -> None:
    for name in ("message", "delta"):
        answer = json.dumps({"choices": [{"index": 0, name: message}]}).encode()
        assert read_answer("chat", [answer])[0].has_more == has_more


def test_a_part_of_an_answer_that_cannot_be_read_is_noticed() -> None:
    events = [{"index": 0, "delta": {"content": "a"}}, {"index": 0, "delta": "b"}, {"index": 0, "delta": {"content": "c"}}]
    copies = [b"data: " + json.dumps({"choices": [event]}).encode() + b"\n\n" for event in events]
    one = read_answer("chat", copies)[0]
    assert (one.text, one.has_more) == ("ac", True)


def test_the_tokens_of_text_that_a_stop_text_removes_from_the_answer_are_not_recorded(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, redact=lambda shown: shown) as scene:
        words = scene.chat("w1", **DRAW)[1]["choices"][0]["message"]["content"].split()
        for stop, keeps in (([], True), ([words[1]], False)):
            ((one, prompt, made),) = recorded(scene, "w1", stop=stop)
            assert (one.train, made.tokens.any(), prompt != [0]) == (keeps, keeps, keeps)


def test_an_answer_whose_text_was_lost_is_not_recorded_if_a_function_decides() -> None:
    intent = intent_of(asked_for(dict(WHOLE)), engine="http://e", seq=3, channel=None, user=None)
    with pytest.raises(Unusable, match="before the function for redaction was asked"):
        row_of(intent, [], logprobs=None, oldest=3, redact=dict)


def test_a_restarted_gateway_does_not_record_answers_that_its_function_has_not_seen(
    policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url:
        with gateway(store, tmp_path, url, redact=rule) as scene:
            engine.answers_status = 503
            lost = scene.chat()[2]["x-deltawire-inference-id"]
        assert not any(b"w1 w2" in path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file())
        engine.answers_status = 0
        with gateway(store, tmp_path, url, redact=rule) as scene:
            wait_until(lambda: "interaction-unusable" in scene.names(), "the answer without its text")
            scene.wait_for(kept := scene.chat("w1")[2]["x-deltawire-inference-id"])
            assert scene.ids() == [kept]
            assert lost not in scene.ids()


def test_a_restarted_gateway_does_not_guess_facts_of_answers_whose_text_it_has_lost(
    policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url:
        with gateway(store, tmp_path, url) as scene:
            assert [one.facts for one, _, _ in recorded(scene)] == [AnswerFacts(4)]
            engine.answers_status = 503
            lost = scene.chat()[2]["x-deltawire-inference-id"]
        engine.answers_status = 0
        with gateway(store, tmp_path, url) as scene:
            scene.wait_for(lost)
            one, _, _ = parts(scene)[lost, 0]
            assert (one.facts, one.train) == (AnswerFacts(4, has_text=False), True)
