"""A real vLLM server makes completions, and each token is attributed to the version that made it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_completions import Hold
from live_server import LiveServer, wait_until
from tiny_checkpoints import TinyModel, train_visibly

from deltawire.engines import KvCache
from deltawire.engines.vllm.driver.generation import VllmGenerator
from deltawire.errors import EngineRefused
from deltawire.fleet import ClaimedVersion, Coordinator, FleetOptions, StalenessBudget
from deltawire.fleet.generation import Interrupted
from deltawire.format.records.trainer_records import Sampling
from deltawire.rl.member import MemberOptions
from deltawire.rl.member import serve as member_from_options
from deltawire.store import open_store

pytestmark = pytest.mark.slow

ROWS = [{"prompt": "w1 w2 w3"}, {"prompt": "w4"}]


def test_tokens_are_attributed_to_the_version_that_made_them_across_swaps(
    start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    run = start_run(TinyModel("dense"))
    first = run.publish()
    arguments = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    server = serve(run.checkpoint, arguments=arguments, environment=Hold.environment(tmp_path / "hold")).wait()
    with open_store(run.store) as store:
        generator = VllmGenerator(store, server.url, poll=0.05, kv_cache=KvCache.MARK)
        try:
            generator.start()
            wait_until(lambda: generator.version == first, "the first version")
            prompts = generator.encode(ROWS)
            drawn = generator.generate(prompts, Sampling(samples=3, max_tokens=12, temperature=0.7, seed=5))
            assert len(drawn) == 6
            assert generator.engine.startswith("vllm 0.")  # with the release that the server tells
            for each in drawn:
                assert 1 <= len(each.tokens) <= 12
                assert (each.logprobs <= 0).all()
                assert [(span.start, span.end, span.version) for span in each.spans] == [(0, len(each.tokens), first)]
            for exact in (True, False):
                generator._has_exact_route = exact
                assert generator._body(prompts[0], Sampling(samples=1, max_tokens=1), 0, first)[1]["cache_salt"] == f"v{first.seq}"
            generator._has_exact_route = True
            text = generator.decode([ROWS[0]], [drawn[0].tokens.tolist()])
            assert isinstance(text[0], str)

            long = Sampling(samples=4, max_tokens=400, seed=9)
            with ThreadPoolExecutor(1) as pool:
                with Hold(tmp_path / "hold", tokens=25) as hold:
                    generated = pool.submit(generator.generate, prompts, Sampling(samples=4, max_tokens=60, seed=9))
                    hold.wait()
                    last = run.publish()
                    wait_until(lambda: generator.version == last, "the last version")
                made = generated.result()
            assert any([span.version for span in each.spans] == [first, last] for each in made)
            assert len(made) == 8
            for each in made:
                places = [(span.start, span.end) for span in each.spans]
                assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
                assert places[-1][1] == len(each.tokens)
                seqs = [span.version.seq for span in each.spans]
                assert seqs == sorted(seqs)

            stop = threading.Event()
            stop.set()
            with pytest.raises(Interrupted):
                generator.generate(prompts, long, stop=stop.is_set)

            assert generator._has_exact_route
            generator._has_exact_route = False  # some servers do not have that route
            plain = generator.generate(prompts, Sampling(samples=2, max_tokens=6))
            assert [each.spans[0].version for each in plain] == [last] * 4
            assert all(each.logprobs.dtype == np.float32 and (each.logprobs <= 0).all() for each in plain)

            generator._logprobs_mode = "raw_logprobs"  # vLLM's default
            with pytest.raises(EngineRefused, match="logprobs-mode"):
                generator.generate(prompts, Sampling(samples=1, max_tokens=6, temperature=0.5))
        finally:
            generator.close()


def length(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_a_member_makes_rollouts_with_a_vllm_server_of_a_quantised_policy(
    start_run: Callable[..., Any], serve: Callable[..., LiveServer]
) -> None:
    run = start_run(TinyModel("quantised", scale=4, layers=1), recipe="int4")
    versions = [run.publisher.publish(run.state, step=0)]
    server = serve(run.saved(), arguments=["--enable-scale-out"]).wait()
    options = MemberOptions(run.store, f"vllm={server.url}", (f"{__name__}:length",), "m", mirror=str(run.mirror), poll=0.05)
    member = threading.Thread(target=member_from_options, args=(options,), kwargs={"stop": threading.Event()})
    member.start()
    budget = StalenessBudget(0)  # so that the server follows an update before the second round
    with Coordinator(run.store, epoch=run.publisher.epoch, budget=budget, options=FleetOptions(poll_seconds=0.05)) as fleet:
        for step in (1, 2):
            rows = [[{"prompt": "w1 w2"}, {"prompt": "w3"}], [{"prompt": "w4"}]]
            fleet.open_round(rows, for_step=step, sampling=Sampling(samples=2, max_tokens=16))
            batch = fleet.collect(step, timeout=300)
            for rollouts in batch.rollouts:
                assert rollouts.versions == {versions[-1].seq: ClaimedVersion(versions[-1].step, versions[-1].digest)}
                assert [one.rewards for one in rollouts.completions] == [(float(len(one.tokens)),) for one in rollouts.completions]
            train_visibly(run.state, np.random.default_rng(step))
            versions.append(run.publisher.publish(run.state, step=step))
            fleet.published(versions[-1])
        fleet.stop()
        member.join(300)
    assert not member.is_alive()
    (worker,) = server.routes.status()
    assert worker["tensors"]["mapped"] > 0  # int4 codes in the layout of the kernel
    assert worker["last"]["loaded_anew"] == 0
