"""Updates of an MoE policy with the experts that members recorded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learning_run import trainer
from moe_models import another_routing, moe_model
from test_training_batches import completion, rollouts
from tiny_models import bits, torch

from deltawire.errors import UnsupportedRouting, UnusableRouting
from deltawire.format.rollouts import Completion, Rollouts
from deltawire.rl.routing.router_replay import RouterReplay
from deltawire.rl.settings import GrpoSettings
from deltawire.rl.update import PolicyUpdate, Updated
from deltawire.store.memory import MemoryStore


@dataclass(frozen=True, slots=True, eq=False)
class Recorded(Completion):
    experts: Any = None


def with_experts(one: Completion, experts: Any) -> Completion:
    return Recorded(**{each.name: getattr(one, each.name) for each in fields(Completion)}, experts=experts)


def results() -> list[Rollouts]:
    """Return two results. Their completions have different lengths and rewards."""
    first = [completion(0, [5, 6, 7, 8], rewards=[1.0]), completion(0, [9, 10], rewards=[0.0])]
    second = [completion(0, [11, 12, 13], rewards=[0.5]), completion(0, [14], rewards=[0.0])]
    return [rollouts([[1, 2, 3]], first), rollouts([[4]], second)]


def recorded(model: Any, whole: Rollouts, other: bool = False) -> Rollouts:
    """Add the experts that the model uses for each token. The last token of a sequence has none, as in vLLM's answers."""
    made = []
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        for one in whole.completions:
            ids = torch.from_numpy(np.concatenate([whole.prompts[one.prompt], one.tokens]).astype(np.int64))[None]
            model(input_ids=ids)
            experts = recording.take()
            if other:
                experts = another_routing(experts.shape, replay.experts).numpy()
            experts[-1] = -1
            made.append(with_experts(one, experts))
    return replace(whole, completions=tuple(made))


def updated(model: Any, given: list[Rollouts], **settings: Any) -> tuple[Any, Updated]:
    """Return the bits of the weights after one update, and its measurements."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = PolicyUpdate(model, optimizer, GrpoSettings(**settings), torch.float32)
    try:
        found = update.apply(update.batch(given, 3))
    finally:
        update.close()
    assert not any(module._forward_hooks for module in model.modules())
    return bits(dict(model.named_parameters())), found


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("settings", [{}, {"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 3, "num_iterations": 2}])
def test_replay_of_the_policys_own_experts_changes_nothing(name: str, settings: Any):
    model = moe_model(name)
    given = [recorded(model, each) for each in results()]
    if settings.get("num_iterations"):
        settings = settings | {"max_grad_norm": 1e-4}  # the second iteration still chooses the same experts
    plain, _ = updated(model, given, **settings)
    assert plain != bits(dict(model.named_parameters()))
    replayed, found = updated(model, given, router_replay=True, **settings)
    assert replayed == plain
    tokens = 7 + 5 + 4 + 2
    assert found.measured["routing/replayed_ratio"] == pytest.approx((tokens - 4) / tokens)
    assert found.measured["routing/differing_ratio"] == 0
    assert found.measured["routing/damaged"] == 0


def test_experts_that_the_policy_would_not_choose_are_replayed_and_counted():
    model = moe_model("qwen3_moe")
    given = [recorded(model, each, other=True) for each in results()]
    plain, own = updated(model, given)
    replayed, found = updated(model, given, router_replay=True)
    assert replayed != plain
    assert 0.5 < found.measured["routing/differing_ratio"] <= 1
    assert found.tokens.drift.tolist() != own.tokens.drift.tolist()


def test_results_without_experts_are_trained_on_too():
    model = moe_model("qwen3_moe")
    first, second = results()
    plain, _ = updated(model, [first, second])
    none, found = updated(model, [first, second], router_replay=True)
    assert none == plain
    assert found.measured["routing/replayed_ratio"] == 0
    mixed, found = updated(model, [recorded(model, first), second], router_replay=True)
    assert mixed == plain
    assert found.measured["routing/replayed_ratio"] == pytest.approx((12 - 2) / 18)


def test_rows_that_members_dropped_are_counted():
    model = moe_model("qwen3_moe")
    first, second = (recorded(model, each) for each in results())
    routing: Any = SimpleNamespace(broken=3)
    _, found = updated(model, [replace(first, routing=routing), second], router_replay=True)
    assert found.measured["routing/damaged"] == 3


def hostile(change: Any) -> Any:
    def changed(whole: Rollouts) -> Rollouts:
        first, *rest = whole.completions
        return replace(whole, completions=(with_experts(first, change(first.experts)), *rest))  # type: ignore[attr-defined]

    return changed


@pytest.mark.parametrize(
    "change",
    [
        hostile(lambda experts: np.where(experts == experts.max(), 8, experts)),
        hostile(lambda experts: np.full_like(experts, 2**31 - 1)),
        hostile(lambda experts: experts - 1),
        hostile(lambda experts: experts[:-1]),
        hostile(lambda experts: experts[:, :1]),
        hostile(lambda experts: experts[..., :2]),
        hostile(lambda experts: experts.astype(np.float32)),
        hostile(lambda experts: experts[0]),
    ],
)
def test_a_result_with_hostile_experts_is_found_before_anything_is_trained(change: Any):
    model = moe_model("qwen3_moe")
    before = bits(dict(model.named_parameters()))
    good, bad = recorded(model, results()[0]), change(recorded(model, results()[1]))
    update = PolicyUpdate(model, torch.optim.SGD(model.parameters(), lr=0.1), GrpoSettings(router_replay=True), torch.float32)
    with pytest.raises(UnusableRouting):
        update.batch([good, bad], 3)
    failing = update.failing_alone([good, bad], 3)
    assert list(failing) == [1]
    assert failing[1].startswith("UnusableRouting: ")
    assert bits(dict(model.named_parameters())) == before
    update.close()


def test_a_forward_pass_that_fails_does_not_spoil_the_next_one(monkeypatch: pytest.MonkeyPatch):
    model = moe_model("qwen3_moe")
    good = recorded(model, results()[0])
    update = PolicyUpdate(model, torch.optim.SGD(model.parameters(), lr=0.1), GrpoSettings(router_replay=True), torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
        assert update.failing_alone([good], 3).keys() == {0}
    assert update.failing_alone([good], 3) == {}
    update.close()


def test_a_model_whose_routing_is_not_known_is_refused_before_anything_is_published():
    store = MemoryStore()
    with pytest.raises(UnsupportedRouting, match="names no router class"):
        trainer(store, None, settings=GrpoSettings(router_replay=True))
    assert list(store.list("")) == []
