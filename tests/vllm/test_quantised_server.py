"""A real vLLM server follows chains of quantised versions. Its kernels repack the weights, and no version is loaded anew."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer
from tiny_checkpoints import TinyModel, train_visibly

import deltawire
from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.vllm.driver.canary import check_decoding
from deltawire.engines.vllm.driver.routes import VllmRoutes
from deltawire.publish.writer_options import WriterOptions

pytestmark = pytest.mark.slow

MODEL = TinyModel("quantised", scale=4, layers=1)


def logprobs(server: LiveServer) -> Any:
    """Return what the server computes for each token of a prompt."""
    body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "logprobs": 2}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["prompt_logprobs"], choice["logprobs"]["token_logprobs"]


def update(routes: VllmRoutes, seq: int) -> dict[str, Any]:
    routes.pause("abort", clear_cache=True)
    routes.start_update()
    routes.update(seq)
    routes.finish_update(str(seq))
    routes.resume()
    (worker,) = routes.status()
    assert worker["seq"] == seq
    return worker


@pytest.mark.parametrize("recipe", ["fp8-channel", "int4"])
def test_after_twenty_updates_and_a_restart_of_the_trainer_a_server_computes_what_a_fresh_one_does(
    recipe: str, tmp_path: Path, serve: Callable[..., LiveServer]
) -> None:
    """The server starts from the last version, so that it is the fresh one first. Then it loads the first version and follows the chain."""
    state, rng, store = MODEL.state(), np.random.default_rng(3), str(tmp_path / "store")
    attachments = {path.name: path for path in MODEL.save(tmp_path / "start", state).iterdir() if path.suffix == ".json"}
    seqs: list[int] = []
    for count in (11, 10):
        with Publisher(store, quantise=recipe, attachments=attachments, options=WriterOptions(segment_bytes=1 << 16)) as publisher:
            for _ in range(count):
                seqs.append(publisher.publish(state).seq)
                train_visibly(state, rng)
    deltawire.pull(store, tmp_path / "last", options=ReaderOptions(pin=False))
    server = serve(tmp_path / "last").wait()
    fresh = logprobs(server), server.routes.checksums()
    server.routes.initialise({"spool": str(tmp_path / "spool"), "url": store})
    seen = []
    for seq in seqs:
        worker = update(server.routes, seq)
        seen.append(logprobs(server))
    assert worker["last"]["loaded_anew"] == 0
    assert worker["tensors"]["mapped"] > 0  # CPUs repack int4, and vLLM widens the scales of fp8-channel
    assert (seen[-1], server.routes.checksums()) == fresh
    assert len({str(each) for each in seen}) == len(seqs)
    assert check_decoding(server.routes).tokens == 32
    update(server.routes, seqs[0])  # back over all versions at once
    assert logprobs(server) == seen[0]
    update(server.routes, seqs[-1])
    assert logprobs(server) == seen[-1]
