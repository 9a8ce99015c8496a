"""A real vLLM server records the experts of every token, and they are those of the right tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, wait_until
from tiny_checkpoints import TinyModel

from deltawire.engines import KvCache
from deltawire.engines.vllm.driver.generation import VllmGenerator
from deltawire.fleet.generation import Generated
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.routing import RoutingLayout
from deltawire.store import open_store

pytestmark = pytest.mark.slow

ARGUMENTS = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--max-num-batched-tokens", "48", "--max-num-seqs", "4"]
LAYOUT = RoutingLayout(16, 2, (0, 1))


def experts_of(checkpoint: Path, tokens: list[int]) -> Any:
    """Return the experts that transformers chooses with these weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from deltawire.rl.router_replay import RouterReplay

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        model(torch.tensor([tokens]))
        return np.sort(recording.take(), -1)


def agreement(found: Any, expected: Any) -> float:
    """Return the share of equal rows. Kernels differ, so near ties are decided otherwise now and then."""
    return float((np.sort(found, -1) == expected).all(-1).mean())


def check(made: Generated, prompt: list[int], checkpoint: Path) -> None:
    assert made.routing is not None
    assert made.routing.layout == LAYOUT
    experts, whole = made.routing.experts, [*prompt, *made.tokens.tolist()]
    assert experts.shape == (len(whole), 2, 2)
    assert (experts[:-1] >= 0).all()
    expected = experts_of(checkpoint, whole)
    assert agreement(experts[:-1], expected[:-1]) > 0.8
    assert agreement(experts[1:-1], expected[:-2]) < 0.5  # rows of the tokens before would not pass


def test_rows_belong_to_their_tokens(start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]) -> None:
    run = start_run(TinyModel("experts", experts=16))
    first = run.publish()
    server = serve(run.checkpoint, arguments=ARGUMENTS).wait()
    chance = np.random.default_rng(0)
    prompts = [chance.integers(1, 60, length).tolist() for length in (100, 3, 40)]  # the first is computed in chunks
    with open_store(run.store) as store:
        generator = VllmGenerator(store, server.url, poll=0.05, kv_cache=KvCache.DROP, routing=True)
        try:
            generator.start()
            wait_until(lambda: generator.version == first, "the first version")
            for _ in range(2):  # the second time, prompts come from the prefix cache, and their rows with them only in part
                made = generator.generate(prompts, Sampling(samples=3, max_tokens=24))
            again = [each.routing for each in made]
            assert all(each is not None for each in again)
            made = generator.generate([[60, *prompt] for prompt in prompts], Sampling(samples=3, max_tokens=24))
            saved = {first.seq: run.saved()}
            for number, each in enumerate(made):
                check(each, [60, *prompts[number // 3]], saved[first.seq])

            is_over = threading.Event()

            def publish_now_and_then() -> None:
                while not is_over.wait(0.3):
                    version = run.publish()
                    saved[version.seq] = run.saved()

            trainer = threading.Thread(target=publish_now_and_then)
            trainer.start()
            mixed: list[Generated] = []

            def swap_fell_into_a_completion() -> bool:
                mixed.extend(each for each in generator.generate([[5, 6, 7]], Sampling(samples=2, max_tokens=300)) if len(each.spans) > 1)
                return bool(mixed)

            try:
                wait_until(swap_fell_into_a_completion, "a completion by several versions", seconds=180)
            finally:
                is_over.set()
                trainer.join()
            for each in mixed:
                assert each.routing is not None
                experts, whole = each.routing.experts, [5, 6, 7, *each.tokens.tolist()]
                assert (experts[3:-1] >= 0).all()
                for span in each.spans:  # a version computes the token before each one that it draws
                    rows = slice(max(span.start + 2, 3), span.end + 2)
                    expected = experts_of(saved[span.version.seq], whole)
                    assert rows.start == rows.stop or agreement(experts[rows], expected[rows]) > 0.7
        finally:
            generator.close()
