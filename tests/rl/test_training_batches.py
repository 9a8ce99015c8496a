"""Rollouts become tensors: every number is at the position of its token, groups follow prompts, and lags follow versions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tiny_models import torch

from deltawire.format.digest import Digest
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from deltawire.rl.batches import training_batch
from deltawire.rl.metrics import step_metrics


def completion(prompt: int, tokens: list[int], *, rewards: Any = (1.0,), mask: Any = None, spans: Any = None) -> Completion:
    return Completion(
        prompt=prompt,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32) / 10,
        mask=np.array(mask or [1] * len(tokens), np.uint8),
        rewards=tuple(rewards),
        spans=tuple(spans or [TokenSpan(0, len(tokens), 4)]),
        finished=True,
    )


def rollouts(prompts: list[list[int]], completions: list[Completion], names: tuple[str, ...] = ("a",)) -> Rollouts:
    versions = {4: ClaimedVersion(2, Digest()), 5: ClaimedVersion(3, Digest())}
    used = {span.seq for one in completions for span in one.spans}
    return Rollouts(
        "0" * 32,
        1,
        0,
        0,
        "m",
        "1" * 32,
        tuple(np.array(prompt, np.int32) for prompt in prompts),
        tuple(completions),
        names,
        {seq: versions[seq] for seq in used},
    )


def test_each_token_has_its_own_numbers_and_padding_has_none():
    batch = training_batch([rollouts([[7, 8]], [completion(0, [1, 2, 3], mask=[1, 0, 1]), completion(0, [4])])], for_step=3)
    assert batch.ids.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0]]
    assert batch.attention.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.behaviour.tolist() == [pytest.approx([0, -0.1, -0.2, -0.3]), pytest.approx([0, -0.4, 0, 0])]
    assert batch.tokens == 3


def test_groups_are_the_completions_of_one_prompt_of_one_task():
    first = rollouts([[1], [2]], [completion(0, [1], rewards=[0]), completion(0, [1], rewards=[2]), completion(1, [1], rewards=[9])])
    second = rollouts([[1]], [completion(0, [1], rewards=[5]), completion(0, [1], rewards=[7])])
    batch = training_batch([first, second], for_step=3)
    assert batch.rewards.tolist() == [0, 2, 9, 5, 7]
    assert batch.advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0, -math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


def test_rewards_add_up_by_their_weights_and_none_says_nothing():
    made = [completion(0, [1], rewards=[1.0, 2.0]), completion(0, [1], rewards=[None, 3.0]), completion(0, [1], rewards=[None, None])]
    batch = training_batch([rollouts([[1]], made, ("a", "b"))], for_step=3, weights={"b": 0.5})
    assert batch.rewards[:2].tolist() == [2.0, 1.5]
    assert batch.rewards[2].isnan()
    assert batch.advantages[2] == 0


def test_lags_count_steps_token_by_token():
    mixed = completion(0, [1, 2, 3, 4], spans=[TokenSpan(0, 3, 4), TokenSpan(3, 4, 5)])  # its tokens are of steps 2, 2, 2 and 3
    batch = training_batch([rollouts([[1]], [mixed, completion(0, [1])])], for_step=4)
    assert batch.lag == pytest.approx((1 + 1 + 1 + 0 + 1) / 5)
    assert batch.mixed == 1


def test_parts_hold_all_rows_without_the_padding_of_others():
    batch = training_batch([rollouts([[7, 8]], [completion(0, [4]), completion(0, [5]), completion(0, [1, 2, 3])])], for_step=3)
    first, second = batch.micro_batches(2, torch.device("cpu"))
    assert first.ids.tolist() == [[7, 8, 4], [7, 8, 5]]
    assert first.mask.shape == first.behaviour.shape == (2, 2)
    assert second.ids.tolist() == [[7, 8, 1, 2, 3]]
    assert first.tokens + second.tokens == batch.tokens


def test_each_reward_has_its_own_mean_and_completions_their_lengths():
    scored = [completion(0, [1, 2, 3], rewards=(1.0, None), mask=[1, 0, 1]), completion(0, [4], rewards=(3.0, None))]
    batch = training_batch([rollouts([[7]], scored, ("right", "never"))], for_step=3)
    assert batch.reward_means == {"right": 2.0, "never": None}
    assert batch.lengths.tolist() == [2, 1]
    assert step_metrics(batch)["rewards/right/mean"] == 2.0
    assert step_metrics(batch)["completions/max_length"] == 2
    assert step_metrics(batch)["completions/clipped_ratio"] == 0.0


def test_metrics_of_completions_without_a_score_are_none():
    batch = training_batch([rollouts([[7]], [completion(0, [1], rewards=(None,))])], for_step=3)
    assert step_metrics(batch)["reward"] is None
    assert step_metrics(batch)["rewards/a/mean"] is None
