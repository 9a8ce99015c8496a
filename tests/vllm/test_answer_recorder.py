"""A gateway records exactly what a real vLLM server drew: token ids, log-probs, and the version of every token, also across swaps."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from gateway_scene import Scene, gateway
from live_server import LiveServer, LiveSidecar, wait_until
from tiny_checkpoints import TinyModel

from deltawire.store import open_store

pytestmark = pytest.mark.slow

RECORDER = ["--middleware", "deltawire.engines.vllm.answer_recorder.AnswerRecorder", "--logprobs-mode", "processed_logprobs"]
MESSAGES = [{"role": "user", "content": "w1 w2"}]


def drawn_by_id(scene: Scene) -> dict[tuple[str, int], Any]:
    return {
        (one.id, one.choice): (one, drawn, file.rollouts.prompts[drawn.prompt].tolist())
        for file in scene.interactions()
        for one, drawn in zip(file.interactions, file.rollouts.completions, strict=True)
    }


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]


def ask_all(scene: Scene) -> None:
    """Ask on every route, and compare what is recorded with what the server itself tells those who ask."""
    exact = {"model": "tiny", "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "return_token_ids": True}
    status, whole, headers = scene.post("/v1/completions", {**exact, "prompt": ["w1 w2", "w3"], "n": 2, "logprobs": 0})
    assert status == 200, whole
    name = headers["x-deltawire-inference-id"]
    assert whole["id"] == f"cmpl-{name}"
    expected = {}
    for choice in whole["choices"]:
        expected[name, choice["index"]] = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
    status, chat, headers = scene.post("/v1/chat/completions", {**exact, "messages": MESSAGES, "logprobs": True, "user": "zoë"})
    assert status == 200, chat
    name = headers["x-deltawire-inference-id"]
    (choice,) = chat["choices"]
    expected[name, 0] = (choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]])
    status, data, headers = scene.post("/v1/chat/completions", {**exact, "messages": MESSAGES, "stream": True, "logprobs": True})
    events = events_of(data)
    assert data.endswith(b"data: [DONE]\n\n")
    name = headers["x-deltawire-inference-id"]
    assert {event["id"] for event in events} == {f"chatcmpl-{name}"}
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    told = [each["logprob"] for choice in choices if choice.get("logprobs") for each in choice["logprobs"]["content"]]
    expected[name, 0] = (tokens, told)
    scene.wait_for(*(name for name, _ in expected))
    found = drawn_by_id(scene)
    for key, (tokens, logprobs) in expected.items():
        one, drawn, _ = found[key]
        assert drawn.tokens.tolist() == tokens
        assert drawn.logprobs.tolist() == pytest.approx(logprobs, abs=1e-4)
        assert (one.temperature, one.top_p, one.facts.length) == (0.7, 0.9, len(tokens))


def test_everything_that_is_answered_is_recorded_with_the_version_of_every_token(
    tmp_path, start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    run = start_run(TinyModel("dense"))
    first = run.publish(changed=False)
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    chats = ["--chat-template", str(template)]
    server, plain = serve(run.checkpoint, arguments=[*RECORDER, *chats]), serve(run.checkpoint, arguments=chats)
    server.wait()
    follow(server.url, run.store)
    wait_until(lambda: server.routes.weight_version() == str(first.seq), "the first version")
    with open_store(run.store) as store, gateway(store, tmp_path, server.url) as scene:
        ask_all(scene)
        assert all(one.train for one, _, _ in drawn_by_id(scene).values())
        for changed in ({"top_k": 1}, {"min_p": 0.1}, {"logit_bias": {"5": 1.0}}, {"allowed_token_ids": [5, 6, 7]}, {"min_tokens": 2}):
            _, _, headers = scene.post("/v1/completions", {"model": "tiny", "prompt": "w1", "max_tokens": 3, **changed})
            scene.wait_for(name := headers["x-deltawire-inference-id"])
            assert not drawn_by_id(scene)[name, 0][0].train, changed
        quiet = {"model": "tiny", "max_tokens": 3, "prompt": "w1"}
        status, answer, headers = scene.post("/v1/completions", quiet)
        assert (status, answer["choices"][0]["logprobs"], answer["choices"][0].get("token_ids")) == (200, None, None)
        status, answer, more = scene.post("/v1/responses", {"model": "tiny", "input": "w1 w2", "max_output_tokens": 4})
        assert status == 200, answer
        name = more["x-deltawire-inference-id"]
        assert answer["id"] == f"resp_{name}"
        scene.wait_for(headers["x-deltawire-inference-id"], name)
        assert drawn_by_id(scene)[name, 0][0].route == "responses"
        status, data, _ = scene.post("/v1/completions", {**quiet, "max_tokens": "many"})
        assert status == 400

        versions = [first]

        def answer_spans_versions() -> bool:
            body = {"model": "tiny", "prompt": "w5", "max_tokens": 400, "ignore_eos": True, "stream": True}
            request = urllib.request.Request(f"{scene.url}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request) as answer:
                answer.readline()
                versions.append(run.publish())
                assert answer.read().endswith(b"data: [DONE]\n\n")
            scene.wait_for(answer.headers["x-deltawire-inference-id"])
            return any(len(drawn.spans) > 1 for _, drawn, _ in drawn_by_id(scene).values())

        wait_until(answer_spans_versions, "an answer of several versions", seconds=180)
        for _, drawn, _ in drawn_by_id(scene).values():
            assert {span.seq for span in drawn.spans} <= {version.seq for version in versions}
            assert [span.start for span in drawn.spans] == [0, *(span.end for span in drawn.spans[:-1])]
        assert scene.get("/metrics")[0] == 200

    # Without the middleware, the answers themselves are asked for token ids and log-probs, which callers do not see.
    plain.wait()
    follow(plain.url, run.store)
    wait_until(lambda: plain.routes.weight_version() == str(versions[-1].seq), "the newest version")
    with open_store(run.store) as store, gateway(store, tmp_path, plain.url, name="plain") as scene:
        before = set(drawn_by_id(scene))
        ask_all(scene)
        status, answer, headers = scene.post("/v1/completions", quiet)
        assert answer["choices"][0]["logprobs"] is None
        assert "token_ids" not in answer["choices"][0]
        status, data, more = scene.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "stream": True})
        assert all("token_ids" not in choice and not choice.get("logprobs") for event in events_of(data) for choice in event["choices"])
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        named = scene.post("/v1/completions", {**quiet, **neutral})[2]["x-deltawire-inference-id"]
        scene.wait_for(headers["x-deltawire-inference-id"], more["x-deltawire-inference-id"], named)
        found = drawn_by_id(scene)
        for key in found.keys() - before:
            one, drawn, _ = found[key]
            assert [(span.start, span.end, span.seq) for span in drawn.spans] == [(0, len(drawn.tokens), versions[-1].seq)]
            assert one.train == (one.id == named)  # this server does not tell its defaults, and its log-probs lack the temperature
