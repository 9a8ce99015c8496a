"""Compare the loss with a slow and obvious version of it, and its gradient with finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_models import qwen, torch

from deltawire.rl.grpo import GrpoLoss, group_advantages, logprobs_and_entropy, token_logprobs


def slow_loss(current: Any, behaviour: Any, old: Any, advantages: Any, mask: Any, *, low: float, high: float, cap: float) -> float:
    """Return the loss, computed one token at a time, as the formula is written."""
    total, count = 0.0, 0
    for row in range(len(mask)):
        for place in range(len(mask[row])):
            if not mask[row][place]:
                continue
            advantage = float(advantages[row])
            ratio = math.exp(current[row][place] - old[row][place])
            weight = min(math.exp(old[row][place] - behaviour[row][place]), cap)
            clipped = min(max(ratio, 1 - low), 1 + high)
            total -= weight * min(ratio * advantage, clipped * advantage)
            count += 1
    return total / count


def random_case(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, scale: float) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    behaviour = -numbers(6, 9, scale=1).abs()
    old = behaviour + numbers(6, 9, scale=0.5)
    return {
        "behaviour": behaviour,
        "old": old,
        "current": old + numbers(6, 9, scale=0.3),
        "advantages": numbers(6, scale=1),
        "mask": torch.rand(6, 9, generator=generator) < 0.7,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_obvious_one(seed: int):
    case = random_case(seed)
    terms = GrpoLoss(0.1, 0.3, 1.5)(**case)
    assert terms.loss.item() == pytest.approx(slow_loss(**{k: v.tolist() for k, v in case.items()}, low=0.1, high=0.3, cap=1.5))
    ratio, mask = torch.exp(case["current"] - case["old"]), case["mask"]
    gains = case["advantages"][:, None] > 0
    cut = ((ratio > 1.3) & gains) | ((ratio < 0.9) & ~gains)
    assert terms.clipped == int((cut & mask).sum()) > 0
    assert terms.truncated == int(((torch.exp(case["old"] - case["behaviour"]) > 1.5) & mask).sum()) > 0
    assert terms.tokens == int(mask.sum())
    ratios = torch.exp(case["old"] - case["behaviour"])[mask]
    assert terms.mismatch == pytest.approx(float((ratios - ratios.log() - 1).sum()))


def test_without_correction_tokens_count_as_if_the_old_policy_had_drawn_them():
    case = random_case(1)
    terms = GrpoLoss(importance_sampling_correction=False)(**case)
    as_drawn = GrpoLoss()(**{**case, "behaviour": case["old"]})
    assert terms.loss.item() == as_drawn.loss.item()
    assert (terms.weight, terms.truncated) == (terms.tokens, 0)
    assert terms.mismatch == GrpoLoss()(**case).mismatch > 0  # it is measured in any case


LOGS = torch.tensor([[math.log(0.5), math.log(3.0), math.log(8.0)], [math.log(2.0), math.log(0.9), 99.0]], dtype=torch.float64)
"""The logs of the ratios old/behaviour of two completions. The last token of the second is masked."""


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights", "truncated"),
    [
        ("token_truncate", None, 2.0, [[0.5, 2, 2], [2, 0.9, 0]], [[0, 1, 1], [0, 0, 0]]),
        ("token_truncate", 0.6, 2.5, [[0.6, 2.5, 2.5], [2, 0.9, 0]], [[1, 1, 1], [0, 0, 0]]),
        ("token_mask", None, 2.5, [[0.5, 0, 0], [2, 0.9, 0]], [[0, 1, 1], [0, 0, 0]]),
        ("token_mask", 0.8, 3.5, [[0, 3, 0], [2, 0.9, 0]], [[1, 0, 1], [0, 0, 0]]),
        ("sequence_truncate", None, 5.0, [[5, 5, 5], [1.8, 1.8, 0]], [[1, 1, 1], [0, 0, 0]]),
        ("sequence_truncate", None, 20.0, [[12, 12, 12], [1.8, 1.8, 0]], [[0, 0, 0], [0, 0, 0]]),
        ("sequence_mask", None, 5.0, [[0, 0, 0], [1.8, 1.8, 0]], [[1, 1, 1], [0, 0, 0]]),
        ("sequence_mask", 0.5, 1.5, [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 0]]),
    ],
)
def test_weights_out_of_bounds_are_truncated_or_masked(mode: Any, low: float | None, high: float, weights: Any, truncated: Any):
    current = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    loss = GrpoLoss(importance_sampling_mode=mode, importance_sampling_clip_min=low, importance_sampling_clip_max=high)
    terms = loss(current, -LOGS, torch.tensor([1.0, -1.0], dtype=torch.float64), mask)
    terms.loss.backward()
    expected = torch.tensor(weights, dtype=torch.float64)
    assert terms.weight == pytest.approx(float(expected.sum()))
    assert terms.is_truncated.int().tolist() == truncated
    assert terms.truncated == int(torch.tensor(truncated).sum())
    assert current.grad is not None
    assert (current.grad * 5).tolist() == [pytest.approx((-row * sign).tolist()) for row, sign in zip(expected, (1, -1), strict=True)]
    assert terms.drift.tolist() == [pytest.approx(row) for row in (LOGS * mask).tolist()]


def test_a_long_completion_does_not_make_an_infinite_weight():
    loss = GrpoLoss(importance_sampling_mode="sequence_mask", importance_sampling_clip_max=math.inf)
    terms = loss(torch.full((1, 4000), 15.0), torch.zeros(1, 4000), torch.ones(1), torch.ones(1, 4000))
    assert math.isfinite(terms.loss.item())
    assert terms.truncated == 0


@pytest.mark.parametrize(("mode", "weight"), [("sequence_truncate", 2.0), ("sequence_mask", 0.0)])
def test_the_weight_of_a_completion_is_of_its_whole_ratios(mode: Any, weight: float):
    """The ratios are e^40 and e^-30, so their product is far above the bound. Bounded one by one, they would give e^-10."""
    behaviour = torch.tensor([[-41.0, -1.0]])
    terms = GrpoLoss(importance_sampling_mode=mode)(torch.tensor([[-1.0, -31.0]]), behaviour, torch.ones(1), torch.ones(1, 2))
    assert terms.weight == 2 * weight
    assert terms.is_truncated.all()
    assert terms.drift.tolist() == [[20.0, -30.0]]


@pytest.mark.parametrize("bad", [{"mode": "tis"}, {"clip_max": 0.5}, {"clip_min": 1.5}, {"clip_min": -1.0}, {"clip_max": math.nan}])
def test_bounds_must_include_a_weight_of_one(bad: dict[str, Any]):
    with pytest.raises(ValueError, match="importance_sampling"):
        GrpoLoss(**{f"importance_sampling_{name}": value for name, value in bad.items()})


def test_the_mismatch_of_nearly_equal_policies_is_exact():
    behaviour = torch.full((1, 4), -1.0)
    terms = GrpoLoss()(behaviour + 1e-4, behaviour, torch.ones(1), torch.ones(1, 4))
    assert terms.mismatch == pytest.approx(4 * 1e-8 / 2, rel=1e-2)


def test_the_gradient_is_that_of_the_loss():
    case = random_case(7)
    current = case.pop("current").requires_grad_()
    loss = GrpoLoss()
    assert torch.autograd.gradcheck(lambda x: loss(x, **case).loss, (current,), eps=1e-6, atol=1e-6)


def test_a_token_cut_off_by_the_clip_has_no_gradient_and_a_masked_one_never():
    current = torch.tensor([[0.5, 0.0, 0.0]], requires_grad=True)
    zeros, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    GrpoLoss()(current, zeros, torch.tensor([1.0]), mask, old=zeros).loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == [[0.0, -0.5, 0.0]]


def test_the_content_of_padding_does_not_matter():
    case = random_case(1)
    expected = GrpoLoss()(**case).loss
    for name in ("current", "behaviour", "old"):
        case[name] = torch.where(case["mask"], case[name], torch.tensor([math.nan, math.inf, -math.inf] * 3))
    current = case["current"].requires_grad_()
    terms = GrpoLoss()(**case)
    terms.loss.backward()
    assert terms.loss.item() == expected.item()
    assert current.grad is not None
    assert current.grad.isfinite().all()


def test_parts_of_a_batch_add_up_to_the_whole():
    case = random_case(2)
    whole = GrpoLoss()(**case)
    parts = [GrpoLoss()(**{name: value[rows] for name, value in case.items()}, tokens=whole.tokens) for rows in (slice(0, 2), slice(2, 6))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    assert sum(part.clipped for part in parts) == whole.clipped
    assert sum(part.weight for part in parts) == pytest.approx(whole.weight)


def test_on_its_own_tokens_the_first_update_is_the_plain_policy_gradient():
    current = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])
    terms = GrpoLoss()(current, current.detach(), advantages, torch.ones(2, 2))
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == [[-0.25, -0.25], [0.5, 0.5]]
    assert (terms.clipped, terms.truncated, terms.weight) == (0, 0, 4.0)


def test_the_weight_of_a_token_that_others_made_is_capped():
    current = torch.tensor([[0.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[-math.log(1.5), -math.log(10)]])
    GrpoLoss()(current, behaviour, torch.tensor([1.0]), torch.ones(1, 2)).loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == [pytest.approx([-0.75, -1.0])]


def test_advantages_compare_within_groups_only():
    rewards = torch.tensor([1.0, 3.0, 10.0, 10.0, 5.0, math.nan, 4.0, 6.0, math.nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    deviation = math.sqrt(2)
    assert group_advantages(rewards, groups).tolist() == pytest.approx(
        [-1 / deviation, 1 / deviation, 0, 0, 0, 0, -1 / deviation, 1 / deviation, 0], abs=1e-5
    )


def test_logprobs_of_a_padded_batch_are_those_of_each_row_alone():
    model = qwen(3, dtype=torch.float32)
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
    with torch.no_grad():
        found = token_logprobs(model, ids, mask, temperature=0.8)
        for number, row in enumerate(rows):
            expected = torch.log_softmax(model(torch.tensor([row])).logits[0] / 0.8, -1)
            for place in range(1, len(row)):
                assert found[number, place - 1].item() == pytest.approx(expected[place - 1, row[place]].item(), abs=1e-5)


def test_no_ratio_and_no_weight_is_ever_infinite():
    current = torch.tensor([[0.0, -3e38, 0.0]], requires_grad=True)
    behaviour, old = torch.tensor([[-3e38, 0.0, -1000.0]]), torch.tensor([[0.0, 0.0, -3e38]])
    for advantage in (1.0, -1.0, 0.0):
        terms = GrpoLoss()(current, behaviour, torch.tensor([advantage]), torch.ones(1, 3), old=old)
        terms.loss.backward()
        assert torch.isfinite(terms.loss)
        assert math.isfinite(terms.weight)
        assert current.grad is not None
        assert torch.isfinite(current.grad).all()


def test_advantages_of_the_largest_rewards_are_finite():
    rewards = torch.tensor([1e9, -1e9, 1e9, 0.0, 64e15, -64e15], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1])).float()
    assert torch.isfinite(advantages).all()
    assert advantages.abs().max() < 2


def test_entropy_is_that_of_the_distribution_that_tokens_are_drawn_from():
    model = qwen(dtype=torch.float32)
    ids = torch.randint(0, 96, (2, 5))
    for temperature in (1.0, 0.5):
        logprobs, entropies = logprobs_and_entropy(model, ids, torch.ones_like(ids), temperature=temperature)
        expected = torch.distributions.Categorical(logits=model(ids).logits[:, :-1] / temperature)
        assert torch.allclose(entropies, expected.entropy(), atol=1e-5)
        assert torch.allclose(logprobs, expected.log_prob(ids[:, 1:]), atol=1e-5)
        assert not entropies.requires_grad
