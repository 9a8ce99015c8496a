"""The gateway: an OpenAI-compatible proxy in front of engines that follow a chain, which records what it answers.

    options.py         the options of a gateway
    server.py          serves all of it
    app.py             the routes, and the checks that every request passes
    proxy.py           sends a request to an engine, and the answer to the caller
    engine_pool.py     knows which engines run, and which version each has
    engine_client.py   sends requests to engines
    channel_watch.py   knows which versions are on a channel, and which users belong to it
    metrics_watch.py   knows which metrics are declared in the store
    metric_names.py    notices feedback for metrics that are not declared
    feedback.py        checks feedback, and writes it to the store before it is acknowledged
    otlp.py            reads evaluation results from OpenTelemetry exporters
    http/              the HTTP server, the bodies of requests, and who may send one
    recording/         from an answer to a file of interactions in the store

The gateway shares only the store with trainers. docs/live.md describes it for users.
"""

from .options import EngineAddress, GatewayOptions
from .server import serve_gateway

__all__ = ["EngineAddress", "GatewayOptions", "serve_gateway"]
