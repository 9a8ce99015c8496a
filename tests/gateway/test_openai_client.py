"""The official `openai` client works against the gateway unchanged, and every answer is recorded exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
from gateway_scene import Scene, gateway, serving
from tiny_models import torch, transformers
from tiny_policy import TinyPolicy

from deltawire.rl.serving.openai_server import serve_openai
from deltawire.store import Store

openai = pytest.importorskip("openai", reason="openai is not installed")

MESSAGES = [{"role": "user", "content": "w1 w2 w3"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(scene: Scene):
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chats_streamed_and_not_are_recorded_with_the_log_probs_of_the_policy(client, scene: Scene, policy: TinyPolicy) -> None:
    whole = client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=5, seed=3, temperature=0.7, user="zoë")
    streamed = list(
        client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=5, seed=3, temperature=0.7, stream=True, n=2)
    )
    text = "".join(choice.delta.content or "" for chunk in streamed for choice in chunk.choices if choice.index == 0)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in streamed}) == 1
    ids = [answer.id.removeprefix("chatcmpl-") for answer in (whole, streamed[0])]
    scene.wait_for(*ids)
    found = {
        (one.id, one.choice): (one, drawn, file)
        for file in scene.interactions()
        for one, drawn in zip(file.interactions, file.rollouts.completions, strict=True)
    }
    assert found.keys() == {(ids[0], 0), (ids[1], 0), (ids[1], 1)}
    version = policy.first
    for one, drawn, file in found.values():
        assert (one.route, one.model, one.train, one.temperature, one.facts.length) == ("chat", "policy", True, 0.7, len(drawn.tokens))
        assert [(span.start, span.end, span.seq) for span in drawn.spans] == [(0, len(drawn.tokens), version.seq)]
        assert file.rollouts.versions[version.seq].digest == version.digest
        prompt = file.rollouts.prompts[drawn.prompt]
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt.tolist(), *drawn.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.from_numpy(drawn.tokens.astype(np.int64))[:, None])[:, 0]
        assert drawn.logprobs == pytest.approx(expected.numpy(), abs=0.05)
    assert found[ids[0], 0][1].tokens.tolist() == found[ids[1], 0][1].tokens.tolist()
    users = {one.user for one, _, _ in found.values()}
    assert None in users
    assert not any(user and "zoë" in user for user in users)


def test_completions_of_several_prompts_and_responses(client, scene: Scene) -> None:
    both = client.completions.create(model="policy", prompt=["w1 w2", "w3"], max_tokens=3, n=2, logprobs=0, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    pieces = list(client.completions.create(model="policy", prompt="w1 w2", max_tokens=3, stream=True, seed=1))
    assert "".join(piece.choices[0].text for piece in pieces) == both.choices[0].text
    response = client.responses.create(model="policy", input="w1 w2", max_output_tokens=4)
    assert response.output_text
    events = list(client.responses.create(model="policy", input=MESSAGES, max_output_tokens=4, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    ids = [both.id[5:], pieces[0].id[5:], response.id[5:], events[-1].response.id[5:]]
    scene.wait_for(*ids)
    by_id = {name: [one for file in scene.interactions() for one in file.interactions if one.id == name] for name in ids}
    assert [sorted(one.choice for one in by_id[name]) for name in ids] == [[0, 1, 2, 3], [0], [0], [0]]
    assert [by_id[name][0].route for name in ids] == ["completions", "completions", "responses", "responses"]
    (file,) = [file for file in scene.interactions() if file.interactions[0].id == ids[0]]
    prompts = [file.rollouts.prompts[drawn.prompt].tolist() for drawn in file.rollouts.completions[:4]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def save_tools(folder: Path) -> Path:
    """Save a tokenizer whose words are tool calls, every second one with a name that nobody offers. So the tiny model calls tools."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = [
        "<eos>",
        "<unk>",
        *(f'<tool_call>{{"name":"{"find" if n % 2 else "lose"}","arguments":{{"n":{n}}}}}</tool_call>' for n in range(94)),
    ]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ tools | length }}"
    fast.save_pretrained(folder)
    return folder


def test_tool_calls_streamed_and_not_reach_the_caller_and_are_counted(tmp_path: Path, store: Store, monkeypatch) -> None:
    monkeypatch.setattr(tiny_policy, "save_tokenizer", save_tools)
    policy = TinyPolicy(tmp_path, store)
    policy.publish(0)
    settings = {"model": "policy", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 6, "seed": 5}
    with serving(serve_openai, store, poll=0.02) as engine, gateway(store, tmp_path, engine) as scene:
        with openai.OpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**settings)
            chunks = list(client.chat.completions.create(**settings, stream=True))
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.choices[0].message.tool_calls]
        streamed = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed] == calls
        assert whole.choices[0].finish_reason == "tool_calls"
        scene.wait_for(whole.id[9:], chunks[0].id[9:])
        good = sum(name == "find" for name, _ in calls)
        for file in scene.interactions():
            for one in file.interactions:
                assert (one.facts.tool_calls, one.facts.bad_tool_calls) == (good, len(calls) - good)
                assert one.finish == "tool_calls"
    policy.publisher.close()


def test_models_and_errors_of_the_engine_pass_through(client, scene: Scene) -> None:
    assert [model.id for model in client.models.list()] == ["policy"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="policy", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="policy", messages=[])
    with pytest.raises(openai.NotFoundError, match=r"no model 'gpt-4'\. It has 'policy'"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match="no images"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [image]}])
    answered = client.chat.completions.with_raw_response.create(
        model="policy", messages=MESSAGES, max_tokens=2, extra_headers={"x-deltawire-episode-id": "0190a0b0-c0d0-4000-9000-000000000001"}
    )
    name = answered.headers["x-deltawire-inference-id"]
    assert answered.parse().id == f"chatcmpl-{name}"
    assert answered.headers["x-deltawire-version"].isdigit()
    scene.wait_for(name)
    assert scene.ids() == [name]  # requests that failed are not recorded
    (one,) = scene.interactions()[0].interactions
    assert one.episode == "0190a0b0-c0d0-4000-9000-000000000001"
