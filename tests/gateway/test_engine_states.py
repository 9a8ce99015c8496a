"""A gateway tells what is wrong with engines: the operator in detail, and callers without the names of hosts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import gateway, serving, wait_until
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.gateway import EngineAddress, GatewayOptions, app
from deltawire.gateway.engine_client import EngineClient
from deltawire.gateway.engine_pool import EnginePool
from deltawire.publish.channels import ChannelWriter
from deltawire.store import Store

NOWHERE = "http://127.0.0.1:9"


class Chain:
    """All engines follow the chain itself."""

    def rank(self, channel: str | None, seq: int | None) -> int | None:
        return 0

    def exists(self, channel: str | None) -> bool:
        return True


def test_an_engine_that_never_answered_is_told_once() -> None:
    events: list[Event] = []

    async def work() -> None:
        async with EngineClient() as client:
            pool = EnginePool([EngineAddress(NOWHERE)], Chain(), client, on_event=events.append)
            for _ in range(3):
                await pool.look(pool.engines[0])

    asyncio.run(work())
    (event,) = events
    assert (event.name, event.fields["engine"]) == ("engine-away", NOWHERE)
    assert "it accepts no connection (ClientConnectorError" in str(event.fields["reason"])


class Refusing:
    """A server that is no engine: it answers every request with one status and body."""

    def __init__(self, status: int, body: Any) -> None:
        self._status, self._body = status, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from deltawire.gateway.http.bodies import send_json

        await send_json(send, self._body, status=self._status)

    def serve(self, *, stop: Any, on_ready: Any) -> None:
        from deltawire.gateway.http.http_server import listen

        asyncio.run(listen(self, "127.0.0.1", 0, stop, on_ready))


def test_callers_read_why_no_engine_answers_and_not_where_they_are(
    policy: TinyPolicy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReaderOptions().open_log(store)
    ChannelWriter(log, "stable").promote(log.read(policy.first.seq))
    monkeypatch.setattr(app, "_MODELS_SECONDS", 0.3)
    off = ScriptedEngine("99")
    with (
        serving(Refusing(500, {}).serve) as broken,
        serving(off.serve) as off_channel,
        serving(ScriptedEngine(str(policy.first.seq)).serve) as lost,
        gateway(store, tmp_path, f"stable={NOWHERE}", f"stable={broken}", f"stable={off_channel}", f"typo={lost}") as scene,
    ):
        wait_until(lambda: scene.get("/healthz")[1]["up"] == 1, "the probe")  # the engine whose channel does not exist does not count
        status, answer, _ = scene.get("/v1/models")  # although requests may wait two minutes
        assert (status, answer["error"]["type"]) == (503, "EnginesAway")
        message = answer["error"]["message"]
        assert "no engine with a version of channel 'stable' answered within 0.3 s" in message
        assert "engine 1: it accepts no connection; engine 2: it answers with status 500; engine 3: it has commit 99" in message
        assert "which is not on its channel; engine 4: there is no channel 'typo'" in message
        assert "127.0.0.1" not in message
        wait_until(lambda: scene.names().count("engine-away") == 2, "the events")
        told = {str(event.fields["engine"]): str(event.fields["reason"]) for event in scene.events if event.name == "engine-away"}
        assert told.keys() == {NOWHERE, broken}
        assert "/deltawire/engine answered with status 500" in told[broken]


def test_an_engine_that_is_back_and_lost_again_is_told_again() -> None:
    events: list[Event] = []

    async def work() -> None:
        async with EngineClient() as client:
            with socket.create_server(("127.0.0.1", 0)) as free:
                url = f"http://127.0.0.1:{free.getsockname()[1]}"
            pool = EnginePool([EngineAddress(url)], Chain(), client, on_event=events.append)
            (engine,) = pool.engines
            await pool.look(engine)
            engine.up, engine.problem = True, None  # as after a probe that found it
            for _ in range(2):
                await pool.look(engine)

    asyncio.run(work())
    assert [event.name for event in events] == ["engine-away"] * 2


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_an_address_that_ends_with_the_route_of_the_api_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match=r"adds /v1 to .* itself; write http://127.0.0.1:8000$"):
        EngineAddress.parse(f"canary=http://127.0.0.1:8000{end}")
    with pytest.raises(ValueError, match="adds /v1"):
        GatewayOptions([EngineAddress(f"http://127.0.0.1:8000{end}")])
    assert EngineAddress.parse("http://127.0.0.1:8000/v11").url.endswith("/v11")


def test_a_stream_that_breaks_off_names_no_program_to_callers(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    engine = ScriptedEngine(str(policy.first.seq))
    with serving(engine.serve) as url, gateway(store, tmp_path, url) as scene:
        engine.script = ["break"]
        data = scene.chat(stream=True)[1]
        assert b"the engine was lost in mid-answer: it ended its answer early." in data
        for name in (b"Error:", b"aiohttp", b"Payload", b"127.0.0.1"):
            assert name not in data
        wait_until(lambda: "answer-failed" in scene.names(), "the event")
        (event,) = (event for event in scene.events if event.name == "answer-failed")
        assert "Client" in str(event.fields["reason"])  # the operator gets the details
