"""Every token has the log-prob that it was drawn with, and the one version that made it, even if the weights change meanwhile."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import llama, qwen, step, torch

from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.errors import EngineUnavailable
from deltawire.fleet.generation import Generated, Interrupted
from deltawire.format.records.trainer_records import Sampling
from deltawire.rl.sampling import draw, passes_of, sample
from deltawire.store.memory import MemoryStore

PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22]]
VERSION: Any = SimpleNamespace(seq=1)


def still() -> contextlib.AbstractContextManager[Version]:
    """Return the context of a forward pass of weights that never change."""
    return contextlib.nullcontext(VERSION)


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def slow_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Return the log-prob of each token given all earlier tokens, by one whole forward pass per token without cache or padding."""
    found = []
    for place, token in enumerate(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:place]])).logits[0, -1].double()
        found.append(torch.log_softmax(logits / temperature, -1)[token].item())
    return found


@pytest.mark.parametrize("make", [qwen, llama])
def test_logprobs_are_those_of_one_plain_forward_pass_a_token(make: Any):
    model = make(3, dtype=torch.float32)
    samples = sample(model, PROMPTS, Sampling(1, 12, temperature=0.7), forward_pass=still)
    for prompt, made in zip(PROMPTS, samples, strict=True):
        assert len(made.tokens) == 12
        assert not made.finished
        assert made.logprobs.tolist() == pytest.approx(slow_logprobs(model, prompt, made.tokens.tolist(), 0.7), abs=1e-4)


def test_rows_that_end_early_leave_the_others_as_they_were():
    model = qwen(3, dtype=torch.float32)
    prompts = [[token] for token in range(1, 17)]
    stop_tokens = set(range(12))  # every eighth token on average ends a row, so rows end throughout
    samples = sample(model, prompts, Sampling(1, 20, seed=1), forward_pass=still, stop_tokens=stop_tokens)
    lengths = {len(made.tokens) for made in samples}
    assert len(lengths) > 4
    for prompt, made in zip(prompts, samples, strict=True):
        tokens = made.tokens.tolist()
        assert not stop_tokens.intersection(tokens[:-1])
        assert made.finished == (tokens[-1] in stop_tokens)
        assert made.logprobs.tolist() == pytest.approx(slow_logprobs(model, prompt, tokens, 1.0), abs=1e-4)


def test_temperature_zero_takes_the_most_probable_token_for_sure():
    model = qwen(3, dtype=torch.float32)
    (made,) = sample(model, [[1, 2, 3]], Sampling(1, 6, temperature=0), forward_pass=still)
    context = [1, 2, 3]
    for token in made.tokens.tolist():
        with torch.no_grad():
            assert token == model(torch.tensor([context])).logits[0, -1].argmax().item()
        context.append(token)
    assert made.logprobs.tolist() == [0.0] * 6


def test_the_nucleus_is_renormalised_and_nothing_outside_is_drawn():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(4000, 1)
    tokens, logprobs = draw(logits, 1.0, 0.7, seeded(2))
    assert set(tokens.tolist()) == {0, 1}
    expected = {0: math.log(0.5 / 0.8), 1: math.log(0.3 / 0.8)}
    assert logprobs.tolist() == pytest.approx([expected[token] for token in tokens.tolist()], abs=1e-5)
    assert (tokens == 0).float().mean().item() == pytest.approx(0.625, abs=0.03)
    assert set(draw(logits, 1.0, 0.01, seeded(2))[0].tolist()) == {0}  # the most probable token is always kept


def test_the_same_seed_gives_the_same_completions():
    model = qwen(3, dtype=torch.float32)
    first, second, other = (
        [made.tokens.tolist() for made in sample(model, PROMPTS, Sampling(2, 8, seed=seed), forward_pass=still)] for seed in (5, 5, 6)
    )
    assert first == second != other


def test_several_samples_of_a_prompt_stand_together():
    prompts = [[5, 6, 7], [8]]
    samples = sample(qwen(dtype=torch.float32), prompts, Sampling(3, 6), forward_pass=still)
    assert len({tuple(made.tokens.tolist()) for made in samples}) == 6
    for number, made in enumerate(samples):
        expected = slow_logprobs(qwen(dtype=torch.float32), prompts[number // 3], made.tokens.tolist(), 1.0)
        assert made.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def test_generation_can_be_interrupted_between_two_passes():
    passes, asked = [], iter([False, False, False, True])

    def counted() -> contextlib.AbstractContextManager[Version]:
        passes.append(1)
        return still()

    with pytest.raises(Interrupted):
        sample(qwen(), PROMPTS, Sampling(1, 12), forward_pass=counted, stop=lambda: next(asked))
    assert len(passes) == 3


def test_no_prompts_make_no_completions_and_an_empty_prompt_is_refused():
    assert sample(qwen(), [], Sampling(1, 4), forward_pass=still) == []
    with pytest.raises(ValueError, match="at least one token"):
        sample(qwen(), [[1], []], Sampling(1, 4), forward_pass=still)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_weights_of_no_version_make_no_rollouts(store: MemoryStore):
    with Publisher(store) as publisher, HotSwap(store, ModuleEngine(served := qwen(1)), options=ReaderOptions(pin=False)) as policy:
        with pytest.raises(EngineUnavailable, match="does not have a version of the chain yet"):
            sample(served, PROMPTS, Sampling(1, 2), forward_pass=passes_of(policy))
        publisher.publish(qwen(0).state_dict(), step=0)
        policy.sync()
        (made,) = sample(served, [[1]], Sampling(1, 2), forward_pass=passes_of(policy))
        assert [span.version for span in made.spans] == [publisher.version]


def test_a_completion_continues_across_a_swap_with_the_old_versions_cache(store: MemoryStore):
    trainer, served = qwen(0, dtype=torch.float32), qwen(1, dtype=torch.float32)
    with Publisher(store) as publisher, HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as policy:
        old = publisher.publish(trainer.state_dict(), step=0)
        before = copy.deepcopy(trainer)
        policy.sync()
        one_pass, passes = passes_of(policy), 0

        def swap_before_the_fourth() -> contextlib.AbstractContextManager[Version]:
            nonlocal passes
            if passes == 3:
                step(trainer, 1, rate=0.1)
                publisher.publish(trainer.state_dict(), step=1)
                policy.sync()
            passes += 1
            return one_pass()

        (made,) = sample(served, [[5, 6, 7]], Sampling(1, 8), forward_pass=swap_before_the_fourth)
        assert [(span.start, span.end, span.version) for span in made.spans] == [(0, 3, old), (3, 8, publisher.version)]
        tokens = made.tokens.tolist()
        with torch.no_grad():
            first = before(torch.tensor([[5, 6, 7, *tokens[:2]]]), use_cache=True)
            rest = trainer(torch.tensor([tokens[2:7]]), past_key_values=first.past_key_values)
        logits = torch.cat([first.logits[0, 2:], rest.logits[0]])
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert made.logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


class Parrot(torch.nn.Module):
    """A model that only makes the token that its weights name, so every token tells which weights made it. Each pass reads them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.says = torch.nn.Parameter(torch.zeros(2, 4096), requires_grad=False)

    def forward(self, input_ids: Any, **_: Any) -> Any:
        halves = [self.says[half].clone() for half in (0, 1)]
        assert torch.equal(*halves), "weights changed in the middle of a forward pass"
        return SimpleNamespace(logits=halves[0].expand(len(input_ids), 1, -1), past_key_values=None)


def test_each_token_is_attributed_to_the_version_that_made_it_while_swaps_race_with_passes(store: MemoryStore):
    def weights(step: int) -> dict[str, Any]:
        says = torch.zeros(2, 4096)
        says[:, step] = 1.0
        return {"says": says}

    served, is_mixed = Parrot(), threading.Event()
    with Publisher(store) as publisher, HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as policy:
        publisher.publish(weights(0), step=0)
        policy.sync()
        policy.start(poll=0.001)

        def publish_until_some_swap_fell_into_a_completion() -> None:
            for number in range(1, 4096):
                publisher.publish(weights(number), step=number)
                if number >= 30 and is_mixed.is_set():
                    return

        training = threading.Thread(target=publish_until_some_swap_fell_into_a_completion)
        training.start()
        try:
            for made in generations(served, policy, until=lambda: policy.version == publisher.version and not training.is_alive()):
                for span in made.spans:
                    assert set(made.tokens[span.start : span.end].tolist()) == {span.version.step}
                assert [0, *(span.end for span in made.spans)] == [*(span.start for span in made.spans), len(made.tokens)]
                if len(made.spans) > 1:
                    is_mixed.set()
        finally:
            was_mixed = is_mixed.is_set()
            is_mixed.set()  # otherwise the thread would run for a long time after a failure
            training.join()
        assert was_mixed


def generations(model: Any, policy: HotSwap, *, until: Any) -> Iterator[Generated]:
    while not until():
        yield from sample(model, [[1], [2, 3]], Sampling(1, 200, temperature=0), forward_pass=passes_of(policy))
