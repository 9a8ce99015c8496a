"""The gateway: an OpenAI-compatible proxy in front of engines that follow a chain, which records what it answers.

    app.py             the routes, and the checks that every request passes
    origins.py         lets pages of named origins use the gateway
    proxy.py           sends a request to an engine, and the answer to the caller
    engine_pool.py     knows which engines run, and which version each has
    engine_client.py   sends requests to engines
    channel_watch.py   knows which versions are on a channel, and which users belong to it
    answers.py         turns an answer into interactions
    journal.py         keeps interactions on disk until the store has them
    recorder.py        records answers: journal first, then the store
    feedback.py        checks feedback, and writes it to the store before it is acknowledged
    otlp.py            reads evaluation results from OpenTelemetry exporters
    known_ids.py       knows which interactions exist
    id_log.py          keeps the ids of its own interactions on disk
    server.py          serves all of it

The gateway shares only the store with trainers. docs/live.md describes it for users.
"""

from .options import EngineAddress, GatewayOptions
from .server import serve_gateway

__all__ = ["EngineAddress", "GatewayOptions", "serve_gateway"]
