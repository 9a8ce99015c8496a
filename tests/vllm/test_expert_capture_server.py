"""A real vLLM server records the experts of every token, and they are those of the right tokens.

Server and transformers compute in float32, so they choose the same experts, except for near ties, which are not compared.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from held_completions import Hold
from live_server import LiveServer, wait_until
from tiny_checkpoints import State, TinyModel

from deltawire.engines import KvCache
from deltawire.engines.routed_experts import ModelRouters, read_captured_experts
from deltawire.engines.vllm.driver.generation import VllmGenerator
from deltawire.engines.vllm.driver.token_route import TOKEN_ROUTE, token_request
from deltawire.engines.vllm.driver.worker_experts import WorkerExperts
from deltawire.fleet.generation import Generated, GeneratedSpan
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.routing import RoutingLayout
from deltawire.store import open_store

pytestmark = pytest.mark.slow

BLOCK, BATCH = 32, 48
KV_BYTES = 20 * BLOCK * 1024
"""Keys and values of 640 tokens fit. A token has 2 · 2 layers · 2 heads · 32 numbers of 4 bytes."""
ARGUMENTS = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--dtype", "float32", "--max-num-batched-tokens", str(BATCH)]
ARGUMENTS += ["--max-num-seqs", "4", "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(KV_BYTES)]
LAYOUT = RoutingLayout(16, 2, (0, 1))
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class FloatModel(TinyModel):
    """A tiny model in float32."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "dtype": "float32"}

    def state(self, seed: int = 0) -> State:
        return {name: tensor.astype(np.float32) for name, tensor in super().state(seed).items()}


class Made(NamedTuple):
    """A completion of a prompt, with the experts of all of its tokens and those of the prompt."""

    tokens: list[int]
    experts: Any


class Routing:
    """The experts that transformers chooses."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def of(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Return the experts of each token and layer, rising, and which of these rows are no near ties."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        scores = torch.stack([layer.reshape(len(tokens), -1) for layer in logits], 1).numpy()
        order = np.argsort(-scores, -1)
        ranked = np.take_along_axis(scores, order, -1)
        return np.sort(order[..., :2], -1), ranked[..., 1] - ranked[..., 2] > NEAR_TIE

    def check(self, tokens: Sequence[int], experts: Any, rows: slice = slice(None)) -> Any:
        """Check that all rows that are recorded are those of these tokens. Return which ones are."""
        assert experts.shape == (len(tokens), 2, 2)
        expected, is_clear = self.of(tokens)
        has = (experts >= 0).all(-1)
        assert (has | (experts < 0).all(-1)).all()
        equal = (np.sort(experts, -1) == expected).all(-1)
        assert is_clear.mean() > 0.9
        wrong = np.argwhere((has & is_clear & ~equal)[rows]).tolist()
        assert not wrong, f"rows of other tokens at {wrong}"
        return has[:, 0] & has[:, 1]


def send(server: LiveServer, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{server.url}{TOKEN_ROUTE}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def metric(server: LiveServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=300) as answer:
        return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE))


def body_of(prompt: Sequence[int], samples: int, tokens: int) -> dict[str, Any]:
    sampling = {"n": samples, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return token_request("tiny", prompt, sampling)


def complete(server: LiveServer, prompts: Sequence[Sequence[int]], *, samples: int = 1, tokens: int = 8) -> list[list[Made]]:
    """Send all prompts at once. Returns the completions of each, with what the workers recorded."""
    bodies = [(TOKEN_ROUTE, body_of(prompt, samples, tokens)) for prompt in prompts]
    recorded = WorkerExperts(server.routes, bodies)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda each: send(server, each[1]), bodies))
    recorded.add_to(answers)
    made = []
    for prompt, answer in zip(prompts, answers, strict=True):
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        made.append([_read(prompt, choice) for choice in choices])
        assert len(made[-1]) == samples
    return made


def _read(prompt: Sequence[int], choice: dict[str, Any]) -> Made:
    whole = [*prompt, *choice["token_ids"]]
    return Made(whole, read_captured_experts(choice["routed_experts"], ModelRouters(LAYOUT, 2), len(whole)).experts)


def check_prefix_caching_and_chunks(server: LiveServer, routing: Routing, chance: Any) -> None:
    prompt = chance.integers(1, 250, 3 * BLOCK + 4).tolist()
    assert len(prompt) > 2 * BATCH  # the server computes it in three steps
    ((first,),) = complete(server, [prompt])
    assert routing.check(first.tokens, first.experts)[:-1].all()
    assert (first.experts[-1] == -1).all()  # nothing processed the last token
    with pytest.raises(AssertionError, match="other tokens"):  # rows of the tokens before would not pass
        routing.check(first.tokens, np.roll(first.experts, 1, 0))
    ((second,), (longer,)) = complete(server, [prompt, [*prompt, *chance.integers(1, 250, 60).tolist()]])
    for made in (second, longer):
        has = routing.check(made.tokens, made.experts)
        assert not has[: 2 * BLOCK].any()  # these came from the cache
        assert has[3 * BLOCK + 3 : -1].all()


def check_preemption(server: LiveServer, routing: Routing, chance: Any) -> None:
    before = metric(server, "num_preemptions_total")
    prompts = [chance.integers(1, 250, length).tolist() for length in (70, 5)]
    made = complete(server, prompts, samples=4, tokens=220)
    assert metric(server, "num_preemptions_total") > before  # each prompt's completions alone need more than there is
    for prompt, completions in zip(prompts, made, strict=True):
        assert len({tuple(each.tokens) for each in completions}) > 1
        for each in completions:
            assert routing.check(each.tokens, each.experts)[len(prompt) : -1].all()


@contextmanager
def abandoned(server: LiveServer, body: dict[str, Any]) -> Iterator[None]:
    """Send a request, and close the connection in the end without reading the answer."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    client.request("POST", TOKEN_ROUTE, json.dumps(body), {"Content-Type": "application/json"})
    yield
    client.close()


def check_abort_and_resume(server: LiveServer, routing: Routing, chance: Any) -> None:
    shared = chance.integers(1, 250, BLOCK).tolist()
    body = body_of([*shared, 7], 1, 400)
    WorkerExperts(server.routes, [(TOKEN_ROUTE, body)])
    others: list[Made] = []
    before = metric(server, "prompt_tokens_total")
    with abandoned(server, body):
        wait_until(lambda: metric(server, "prompt_tokens_total") > before + BLOCK, "the request")
        together = threading.Thread(target=lambda: others.extend(*complete(server, [[*shared, 9]], samples=2, tokens=60)))
        together.start()
        wait_until(lambda: metric(server, "prompt_tokens_total") > before + 2 * BLOCK + 1, "the other requests")
    together.join()
    assert len(others) == 2
    for made in others:
        assert routing.check(made.tokens, made.experts)[BLOCK:-1].all()
    wait_until(lambda: metric(server, "num_requests_running") == 0, "the end of the aborted request")
    for (made,) in complete(server, [others[0].tokens[:70], [*shared, 7]], tokens=20):
        assert routing.check(made.tokens, made.experts)[len(made.tokens) - 20 : -1].all()
    (left,) = server.routes.call_workers("deltawire_take_experts", [f"0/{body['request_id']}"])
    (rows,) = left.values()
    found = read_captured_experts(rows, ModelRouters(LAYOUT, 2), 512).experts
    routing.check([*shared, 7], found[: BLOCK + 1])


def check_swaps(run: Any, generator: VllmGenerator, path: Path, saved: dict[int, Path], chance: Any) -> None:
    """Let a swap fall into completions. Each version has routers of its own."""
    prompt = [5, 6, 7]
    with ThreadPoolExecutor(1) as pool:
        with Hold(path, tokens=25) as hold:
            generated = pool.submit(generator.generate, [prompt], Sampling(samples=2, max_tokens=60))
            hold.wait()
            for name, tensor in run.state.items():
                if name.endswith("mlp.gate.weight"):
                    tensor[...] = 0.3 * chance.normal(size=tensor.shape)
            version = run.publish()
            saved[version.seq] = run.saved()
            wait_until(lambda: generator.version == version, "the new version")
        made = generated.result()
    mixed = [each for each in made if len(each.spans) > 1]
    assert mixed
    for each in made:
        check_spans(prompt, each, saved)
    with pytest.raises(AssertionError, match="other tokens"):  # the new version alone would have chosen other experts
        check_spans(prompt, replace(mixed[0], spans=(GeneratedSpan(0, len(mixed[0].tokens), version),)), saved)


def check_spans(prompt: Sequence[int], each: Generated, saved: dict[int, Path]) -> None:
    assert each.routing is not None
    assert each.routing.layout == LAYOUT
    experts, whole = each.routing.experts, [*prompt, *each.tokens.tolist()]
    assert (experts[2:-1] >= 0).all()
    for number, span in enumerate(each.spans):  # a version computes the token before each one that it draws
        rows = slice(span.start + 2 if number else 0, span.end + 2)
        Routing(saved[span.version.seq]).check(whole, experts, rows)


def test_rows_belong_to_their_tokens(start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    run = start_run(FloatModel("experts", experts=16))
    first = run.publish()
    server = serve(run.checkpoint, arguments=ARGUMENTS, environment=Hold.environment(tmp_path / "hold")).wait()
    chance = np.random.default_rng(0)
    with open_store(run.store) as store:
        generator = VllmGenerator(store, server.url, poll=0.05, kv_cache=KvCache.DROP, routing=True)
        try:
            generator.start()
            wait_until(lambda: generator.version == first, "the first version")
            saved = {first.seq: run.saved()}
            (made,) = generator.generate([[5, 6, 7]], Sampling(samples=1, max_tokens=8))  # from here on, the workers record
            assert made.routing is not None
            routing = Routing(saved[first.seq])
            assert routing.check([5, 6, 7, *made.tokens.tolist()], made.routing.experts)[:-1].all()
            check_prefix_caching_and_chunks(server, routing, chance)
            check_preemption(server, routing, chance)
            check_abort_and_resume(server, routing, chance)
            check_swaps(run, generator, tmp_path / "hold", saved, chance)
        finally:
            generator.close()
