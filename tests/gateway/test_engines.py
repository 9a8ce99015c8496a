"""Requests survive engines that swap, pause, refuse, break off, restart and leave their channel."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_scene import gateway, serving, wait_until
from scripted_engine import ANSWER, ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.chain.channels import channel_of
from deltawire.chain.reader_options import ReaderOptions
from deltawire.gateway import proxy
from deltawire.publish.channels import ChannelWriter
from deltawire.rl.serving.openai_server import serve_openai
from deltawire.store import Store


@contextlib.contextmanager
def scripted(label: str | None = "0") -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(label)
    with serving(engine.serve) as url:
        yield engine, url


def events_of(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


def streamed_text(data: bytes) -> str:
    return "".join(event["choices"][0]["delta"]["content"] for event in events_of(data)).strip()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[503], [429, 504], ["reset"], ["reset", "reset"], [500], [503, "reset", 502, 500]])
def test_a_request_that_an_engine_refuses_is_answered_later(
    script: list[Any], stream: bool, policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    with scripted(str(policy.first.seq)) as (engine, url), gateway(store, tmp_path, url) as scene:
        engine.script = list(script)
        status, answer, headers = scene.chat(stream=stream)
        assert status == 200
        assert (streamed_text(answer) if stream else answer["choices"][0]["message"]["content"]) == ANSWER
        scene.wait_for(headers["x-deltawire-inference-id"])
        assert len(engine.asked) == len(script) + 1
        assert len(scene.ids()) == 1


def test_a_request_that_is_refused_again_and_again_is_tried_ever_less_often(
    policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(proxy, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(proxy, "time", SimpleNamespace(perf_counter=lambda: sum(pauses)))
    with scripted(str(policy.first.seq)) as (engine, url), gateway(store, tmp_path, url, patience=4.0) as scene:
        engine.script = [503] * 100
        assert scene.chat()[0] == 503  # the answer of the engine itself
        assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
        assert len(engine.asked) == 9


def test_a_request_that_loses_three_engines_gets_a_named_error(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    with scripted(str(policy.first.seq)) as (engine, url), gateway(store, tmp_path, url) as scene:
        engine.script = ["reset", "reset", "reset"]
        status, answer, headers = scene.chat()
        assert (status, answer["error"]["type"], headers["retry-after"]) == (503, "EnginesAway", "1")
        engine.script = [500, 500, 500]
        assert scene.chat()[0] == 500  # the answer of the engine itself, after it was tried again
        assert scene.chat()[0] == 200


def test_a_stream_that_breaks_off_ends_with_a_named_error_and_is_not_recorded(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    with scripted(str(policy.first.seq)) as (engine, url), gateway(store, tmp_path, url) as scene:
        engine.script = ["break"]
        status, data, _ = scene.chat(stream=True)
        events = events_of(data)
        assert status == 200
        assert (events[-1]["error"]["type"], events[-1]["error"]["code"]) == ("EngineLost", 502)
        assert b"[DONE]" not in data
        engine.script = ["break"]
        status, answer, headers = scene.chat()  # nothing was sent to the caller yet, so it is tried again
        assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)
        scene.wait_for(headers["x-deltawire-inference-id"])
        assert len(scene.ids()) == 1
        wait_until(lambda: "answer-failed" in scene.names(), "the event")


def test_no_request_is_refused_while_engines_restart_and_swap(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    """Two engines are replaced one after the other under load, and one of them has gone for good."""
    ports: list[int] = []

    def start(port: int = 0) -> Any:
        return serving(serve_openai, store, poll=0.02, port=port)

    with contextlib.ExitStack() as running:
        first = contextlib.ExitStack()
        urls = [first.enter_context(start()), running.enter_context(start())]
        ports += [int(url.rpartition(":")[2]) for url in urls]
        scene = running.enter_context(gateway(store, tmp_path, *urls))
        stop = threading.Event()
        answers: list[tuple[int, str]] = []

        def ask(client: int) -> None:
            while not stop.is_set():
                status, _, headers = scene.chat(f"w{client}", stream=bool(client % 2))
                answers.append((status, headers.get("x-deltawire-inference-id", "")))

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask, number) for number in range(4)]
            try:
                for number in range(1, 4):
                    policy.publish(number)
                    count = len(answers)
                    wait_until(lambda: len(answers) > count + 8, "answers after a swap")  # noqa: B023
                first.close()
                count = len(answers)
                wait_until(lambda: len(answers) > count + 8, "answers of the other engine")
                running.enter_context(start(ports[0]))
                wait_until(lambda: scene.get("/healthz")[1]["up"] == 2, "the engine that is back")
                count = len(answers)
                wait_until(lambda: len(answers) > count + 8, "answers of both")
            finally:
                stop.set()
            for client in clients:
                client.result()
        assert {status for status, _ in answers} == {200}
        scene.wait_for(*(name for _, name in answers[-8:]))
        ids = scene.ids()
        assert len(ids) == len(set(ids))
        wait_until(lambda: "engine-away" in scene.names(), "the event")


def test_a_request_waits_for_an_engine_that_is_not_there_yet(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    with scripted(None) as (engine, url), gateway(store, tmp_path, url) as scene, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(scene.chat)
        wait_until(lambda: scene.get("/healthz")[0] == 200, "the probe")
        assert not engine.asked  # it has no version yet
        engine.label = str(policy.first.seq)
        assert answer.result()[0] == 200
    with gateway(store, tmp_path, "http://127.0.0.1:9", patience=0.1) as scene:
        status, answer, _ = scene.chat()
        assert (status, answer["error"]["type"]) == (503, "EnginesAway")
        assert scene.get("/healthz")[0] == 503
        assert b"deltawire_gateway_refusals_total" in scene.get("/metrics")[1]


def test_a_caller_that_goes_away_ends_the_request_and_nothing_is_recorded(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    import socket

    with scripted(str(policy.first.seq)) as (engine, url), gateway(store, tmp_path, url) as scene:
        engine.script = ["gone"]
        body = json.dumps({"messages": [], "model": "m"}).encode()
        with socket.create_connection(("127.0.0.1", int(scene.url.rpartition(":")[2]))) as caller:
            caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: engine.asked, "the request")
        engine.gone.wait()
        status, _, headers = scene.chat()
        assert status == 200
        scene.wait_for(headers["x-deltawire-inference-id"])
        assert scene.ids() == [headers["x-deltawire-inference-id"]]


def test_users_get_the_version_of_their_channel_and_engines_off_it_get_no_requests(
    policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    second = policy.publish(1)
    log = ReaderOptions().open_log(store)
    commits = [log.read(version.seq) for version in (policy.first, second)]
    ChannelWriter(log, "stable").promote(commits[0])
    move = ChannelWriter(log, "canary").promote(commits[1], share=500_000)
    with contextlib.ExitStack() as running:
        (_, old_url), (new, new_url) = running.enter_context(scripted(str(policy.first.seq))), running.enter_context(scripted("99"))
        with gateway(store, tmp_path, f"stable={old_url}", f"canary={new_url}") as scene:
            users = [f"user {number}" for number in range(12)]
            expected = {user: channel_of(user, [move]) or "stable" for user in users}
            assert set(expected.values()) == {"canary", "stable"}
            wait_until(lambda: scene.get("/healthz")[1]["up"] == 2, "both engines")
            found = {user: scene.chat(headers={"x-deltawire-user": user})[2] for user in users}
            assert {headers["x-deltawire-channel"] for headers in found.values()} == {"stable"}  # version 99 was never on the canary
            assert not new.asked
            new.label = str(second.seq)
            wait_until(lambda: "canary" in {scene.chat(user=user)[2]["x-deltawire-channel"] for user in users}, "the canary")
            found = {user: scene.chat(user=user)[2] for user in users}
            assert {user: headers["x-deltawire-channel"] for user, headers in found.items()} == expected
            versions = {"stable": str(policy.first.seq), "canary": str(second.seq)}
            assert all(headers["x-deltawire-version"] == versions[headers["x-deltawire-channel"]] for headers in found.values())
            scene.wait_for(*(headers["x-deltawire-inference-id"] for headers in found.values()))
            recorded = {one.id: one for file in scene.interactions() for one in file.interactions}
            for headers in found.values():
                assert recorded[headers["x-deltawire-inference-id"]].channel == headers["x-deltawire-channel"]
            people = {recorded[headers["x-deltawire-inference-id"]].user for headers in found.values()}
            assert len(people) == len(users)
