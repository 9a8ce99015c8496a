"""Test which results are accepted, with one case for each rule of docs/protocol.md §10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltawire import Digest
from deltawire.fleet import ClaimedVersion, Completion, Rollouts, Round, Sampling, StalenessBudget, TokenSpan
from deltawire.fleet.rules.admission import Demand, Reason, Refusal, judge_content, judge_key, judge_origin, judge_versions, most_bytes
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.fleet.rules.training_limits import LARGEST_REWARD, TrainingLimits, why_untrainable
from deltawire.format.records.fleet_files import AcceptedResult
from deltawire.format.records.fleet_parts import ObjectRef
from deltawire.format.records.member_records import Lease
from deltawire.format.rollouts import sequences_of
from deltawire.format.routing import Routing, RoutingLayout
from deltawire.store.fleet_keys import RolloutKey

RUN, NONCE, HASH = "ab" * 16, "cd" * 16, "ef" * 32
ROUND = Round(RUN, 7, 1, NONCE, 5, 3, 2, ObjectRef(f"fleet/tasks/0000000007/{HASH}.json", 9, HASH), 60, Sampling(2, 4), 0)
LEASE = Lease(RUN, 7, 1, 0, "a", NONCE, 8, 0)
KEY = RolloutKey(7, 1, 0, HASH)
DIGEST = Digest((1, 2, 3, 4))


def completion(prompt: int = 0, length: int = 3, own: int | None = None) -> Completion:
    mask = np.array([1] * (length if own is None else own) + [0] * (0 if own is None else length - own), np.uint8)
    return Completion(
        prompt, np.ones(length, np.int32), np.zeros(length, np.float32), mask, (1.0,), (TokenSpan(0, 1, 8), TokenSpan(1, length, 9)), True
    )


GOOD = Rollouts(
    run=RUN,
    round=7,
    task=1,
    attempt=0,
    member="a",
    nonce=NONCE,
    prompts=(np.ones(2, np.int32),),
    completions=(completion(), completion()),
    reward_names=("right",),
    versions={8: ClaimedVersion(3, DIGEST), 9: ClaimedVersion(4, DIGEST)},
)
CHAIN = {8: KnownVersion(8, 3, DIGEST), 9: KnownVersion(9, 4, DIGEST)}
DEMAND = Demand(ROUND, 1, StalenessBudget(1))


def reason_of(refusal: Refusal | None) -> Reason | None:
    return None if refusal is None else refusal.reason


def test_a_good_result_passes_every_test() -> None:
    assert judge_key(KEY, None, closed=False) is None
    assert judge_origin(GOOD, KEY, LEASE, RUN) is None
    assert judge_content(GOOD, DEMAND) is None
    assert judge_versions(GOOD, DEMAND, CHAIN) is None


@pytest.mark.parametrize(
    ("accepted", "closed", "reason"),
    [
        (None, True, "late"),
        (AcceptedResult(1, 0, "00" * 32, 1, "a"), False, "duplicate"),
        (AcceptedResult(1, 0, "00" * 32, 1, "a"), True, "duplicate"),
        (AcceptedResult(1, 1, "00" * 32, 1, "b"), False, "late"),
    ],
)
def test_only_the_first_result_of_a_task_is_looked_at(accepted: AcceptedResult | None, closed: bool, reason: Reason) -> None:
    assert judge_key(KEY, accepted, closed=closed) == reason


@pytest.mark.parametrize(
    ("rollouts", "lease", "reason"),
    [
        (replace(GOOD, run="00" * 16), LEASE, "wrong-run"),
        (replace(GOOD, round=8), LEASE, "malformed"),
        (replace(GOOD, task=0), LEASE, "malformed"),
        (replace(GOOD, attempt=1), LEASE, "malformed"),
        (GOOD, None, "unleased"),
        (GOOD, replace(LEASE, member="b"), "unleased"),
        (GOOD, replace(LEASE, nonce="00" * 16), "unleased"),
        (GOOD, replace(LEASE, id="00" * 16), "unleased"),
    ],
)
def test_a_result_must_match_its_run_key_and_lease(rollouts: Rollouts, lease: Lease | None, reason: Reason) -> None:
    assert judge_origin(rollouts, KEY, lease, RUN) == reason


@pytest.mark.parametrize(
    ("completions", "reason"),
    [
        ((completion(),), "malformed"),
        ((completion(),) * 3, "malformed"),
        ((completion(), completion(length=5)), "malformed"),
        ((completion(), completion(length=9, own=4)), None),
        ((completion(), completion(length=10, own=4)), "malformed"),
    ],
)
def test_a_result_is_what_was_asked_for(completions: tuple[Completion, ...], reason: Reason | None) -> None:
    assert reason_of(judge_content(replace(GOOD, completions=completions), replace(DEMAND, environment_tokens=5))) == reason


def test_tokens_of_an_environment_are_refused_unless_they_are_allowed() -> None:
    long = replace(GOOD, completions=(completion(), completion(length=40_000, own=4)))
    assert reason_of(judge_content(long, DEMAND)) == "malformed"
    assert judge_content(long, replace(DEMAND, environment_tokens=40_000)) is None


def test_prompts_are_the_tasks_own() -> None:
    assert judge_content(GOOD, replace(DEMAND, prompt_ids=[[1, 1]])) is None
    for other in ([1, 2], [1], [1, 1, 1], []):
        assert reason_of(judge_content(GOOD, replace(DEMAND, prompt_ids=[other]))) == "malformed"


def test_no_result_that_is_allowed_is_larger_than_what_is_read() -> None:
    """The largest possible result has a span for every token, and the largest numbers of rewards, versions and texts."""
    names = tuple(f"reward {number:02} " + "x" * 180 for number in range(64))
    demand = replace(DEMAND, prompt_ids=[[1] * 50] * 2, prompts=2, environment_tokens=60)
    length = ROUND.sampling.max_tokens + 60
    versions = {seq: ClaimedVersion(3, DIGEST) for seq in range(10**6, 10**6 + length)}
    spans = tuple(TokenSpan(index, index + 1, 10**6 + index) for index in range(length))
    one = replace(completion(length=length, own=4), rewards=(1.0,) * 64, spans=spans)
    largest = replace(
        GOOD,
        prompts=(np.ones(50, np.int32),) * 2,
        completions=(one, one, replace(one, prompt=1), replace(one, prompt=1)),
        reward_names=names,
        versions=versions,
        seconds={f"second {number:02} " + "x" * 180: 0.1 for number in range(64)},
    )
    assert judge_content(largest, demand) is None
    size = len(largest.to_bytes())
    most = most_bytes(demand)
    assert most is not None
    assert size < most < 1 << 20
    assert most_bytes(DEMAND) is None


def changed(**changes: Any) -> Rollouts:
    return replace(GOOD, completions=(completion(), replace(completion(), **changes)))


@pytest.mark.parametrize(
    ("rollouts", "why"),
    [
        (changed(tokens=np.array([1, 99, 1], np.int32)), None),
        (changed(tokens=np.array([1, 100, 1], np.int32)), "vocabulary"),
        (changed(tokens=np.array([1, 2**31 - 1, 1], np.int32), mask=np.zeros(3, np.uint8)), "vocabulary"),
        (replace(GOOD, prompts=(np.array([1, 100], np.int32),)), "vocabulary"),
        (replace(GOOD, completions=(completion(), completion(length=8))), None),
        (replace(GOOD, completions=(completion(), completion(length=9, own=4))), "positions"),
        (changed(logprobs=np.array([0, -1000, 0], np.float32)), None),
        (changed(logprobs=np.array([0, -3e38, 0], np.float32)), "log-prob"),
        (changed(logprobs=np.array([0, -3e38, 0], np.float32), mask=np.array([1, 0, 1], np.uint8)), None),
        (changed(rewards=(LARGEST_REWARD,)), None),
        (changed(rewards=(None,)), None),
        (changed(rewards=(1e39,)), "reward 'right'"),
        (changed(rewards=(-1e39,)), "reward 'right'"),
    ],
)
def test_results_that_a_model_cannot_be_trained_on_give_a_reason(rollouts: Rollouts, why: str | None) -> None:
    found = why_untrainable(rollouts, TrainingLimits(vocabulary=100, positions=10))
    assert (found is None) if why is None else why in (found or "")


def test_routed_experts_must_be_those_of_the_trainers_model() -> None:
    layout = RoutingLayout(8, 2, (1, 2))
    routed = replace(GOOD, routing=Routing.encode(layout, sequences_of(GOOD.prompts, GOOD.completions), [None] * len(GOOD.completions)))
    for limits in (TrainingLimits(), TrainingLimits(routers=layout)):
        assert why_untrainable(routed, limits) is None
        assert why_untrainable(GOOD, limits) is None
    for other in (RoutingLayout(16, 2, (1, 2)), RoutingLayout(8, 3, (1, 2)), RoutingLayout(8, 2, (0, 1)), RoutingLayout(8, 2, (1,))):
        assert "another model" in (why_untrainable(routed, TrainingLimits(routers=other)) or "")


def test_the_largest_size_of_a_result_has_room_for_any_routing() -> None:
    chance = np.random.default_rng(0)
    for experts, top_k, layers in ((8, 2, 2), (128, 8, 40), (1024, 32, 3)):
        layout = RoutingLayout(experts, top_k, tuple(range(layers)))
        sequences = sequences_of(GOOD.prompts, GOOD.completions)
        rows = np.argsort(chance.random((len(sequences.tokens), layers, experts)), -1)[..., :top_k]
        rows[chance.random(rows.shape[:2]) < 0.5] = -1
        routing = Routing.encode(layout, sequences, np.split(rows, sequences.starts[1:-1]))
        demand = replace(DEMAND, prompt_ids=[prompt.tolist() for prompt in GOOD.prompts])
        most, with_routing = most_bytes(demand), most_bytes(replace(demand, routers=layout))
        assert most is not None
        assert with_routing is not None
        assert routing.nbytes <= with_routing - most


def test_a_result_has_the_prompts_of_its_task() -> None:
    assert reason_of(judge_content(GOOD, replace(DEMAND, prompts=2))) == "malformed"
    two = replace(GOOD, prompts=GOOD.prompts * 2, completions=(completion(0), completion(1), completion(1), completion(0)))
    assert judge_content(two, replace(DEMAND, prompts=2)) is None
    uneven = replace(two, completions=(completion(0),) * 3 + (completion(1),))
    assert reason_of(judge_content(uneven, replace(DEMAND, prompts=2))) == "malformed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({9: None}, "future"),
        ({9: KnownVersion(9, 4, Digest())}, "wrong-digest"),
        ({9: KnownVersion(9, 5, DIGEST)}, "wrong-digest"),
        ({9: KnownVersion(9, 4, DIGEST, live=False)}, "abandoned"),
        ({8: KnownVersion(8, 3, DIGEST, live=False)}, "abandoned"),
    ],
)
def test_all_versions_of_a_result_are_the_chains(changes: dict[int, KnownVersion | None], reason: Reason) -> None:
    assert judge_versions(GOOD, DEMAND, {**CHAIN, **changes}) == reason


@pytest.mark.parametrize(
    ("for_step", "oldest_step", "staleness", "reason"),
    [(5, 3, 1, None), (5, 3, 0, "stale"), (6, 3, 1, "stale"), (5, 4, 1, "stale"), (4, 3, 1, "future"), (5, 2, 9, None)],
)
def test_the_oldest_and_the_newest_token_count(for_step: int, oldest_step: int, staleness: int, reason: Reason | None) -> None:
    """The versions of steps 3 and 4 made the result. Both the round's own bound and this trainer's budget apply."""
    demand = Demand(replace(ROUND, for_step=for_step, oldest_step=oldest_step), 1, StalenessBudget(staleness))
    assert judge_versions(GOOD, demand, CHAIN) == reason
