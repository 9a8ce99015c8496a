"""Rows of a worker's steps go to the right positions of the right requests. The test decides what each step computes."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltawire.engines.routed_experts import ModelRouters, fill_prompts, read_captured_experts
from deltawire.engines.vllm import expert_capture
from deltawire.engines.vllm.expert_capture import ExpertCapture, take_experts
from deltawire.errors import EngineError
from deltawire.format.routing import RecordedExperts, RoutingLayout

ONE, TWO = "deltawire-" + "a" * 32, "deltawire-" + "b" * 32
LAYERS = (1, 4)


class Tensor:
    """The part of a tensor that the capture uses."""

    def __init__(self, rows: Any) -> None:
        self._rows = np.asarray(rows)

    def detach(self) -> Tensor:
        return self

    def to(self, _: str) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self._rows


class Runner:
    """A model runner whose rows say which token of which request they are of, and in which layer: [100 · request + position, layer]."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=[], num_prompt_tokens=[])
        self.mark = 0
        self.prompt = 3
        self.layers = [SimpleNamespace(layer_id=layer, router=SimpleNamespace(set_capture_fn=None)) for layer in LAYERS]
        self.hooks: dict[int, Any] = {}
        for each in self.layers:
            each.router.set_capture_fn = lambda hook, layer=each.layer_id: self.hooks.__setitem__(layer, hook)

    def execute_model(self, scheduled: Any) -> str:
        if not scheduled.parts:
            return "nothing"
        self.input_batch.req_ids = [name for name, _, _, _ in scheduled.parts]
        self.input_batch.num_computed_tokens_cpu = [start for _, _, start, _ in scheduled.parts]
        self.input_batch.num_prompt_tokens = [self.prompt for _ in scheduled.parts]
        tokens = [
            self.mark + 100 * number + position for _, number, start, count in scheduled.parts for position in range(start, start + count)
        ]
        for layer, hook in self.hooks.items():
            hook(Tensor([[token, layer] for token in tokens]))
        return "done"


def step(runner: Any, *parts: tuple[str, int, int, int]) -> str:
    """Compute tokens: request, number, first position, count."""
    scheduled = SimpleNamespace(parts=parts, num_scheduled_tokens={name: count for name, _, _, count in parts})
    return str(runner.execute_model(scheduled))


def internal(name: str, child: int | None = None) -> str:
    return f"{'' if child is None else f'{child}_'}generate-tokens-{name}-0123abcd"


def taken(capture: ExpertCapture, name: str) -> Any:
    answer = capture.take(name)
    assert answer is not None
    return np.frombuffer(base64.b64decode(answer["data"]), "<i2").reshape(answer["shape"])


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def capture(runner: Runner) -> ExpertCapture:
    return ExpertCapture(runner, runner.layers)


def test_chunked_prompts_and_decoding_steps_of_a_mixed_batch(runner: Runner, capture: ExpertCapture) -> None:
    step(runner, (internal(ONE), 1, 0, 3))
    step(runner, (internal(TWO), 2, 0, 2), (internal(ONE), 1, 3, 2))
    step(runner, (internal(ONE), 1, 5, 1), ("cmpl-other-01234567", 3, 0, 4), (internal(TWO), 2, 2, 1))
    first, second = taken(capture, f"0/{ONE}"), taken(capture, f"0/{TWO}")
    assert first[:, 0, 0].tolist() == [100, 101, 102, 103, 104, 105]
    assert second[:, 0, 0].tolist() == [200, 201, 202]
    assert first[0].tolist() == [[100, 1], [100, 4]]
    assert capture.take(f"0/{ONE}") is None  # it was fetched, and forgotten
    assert not capture._requests


def test_tokens_from_the_prefix_cache_have_no_rows_until_another_completion_gives_them(runner: Runner, capture: ExpertCapture) -> None:
    step(runner, (internal(ONE, 0), 1, 0, 5))
    step(runner, (internal(ONE, 0), 1, 5, 1), (internal(ONE, 1), 1, 4, 1))  # the second has four tokens from the cache
    step(runner, (internal(ONE, 1), 1, 5, 1))
    whole, cached = taken(capture, f"0/{ONE}"), taken(capture, f"1/{ONE}")
    assert cached[:, 0, 0].tolist() == [-1, -1, -1, -1, 104, 105]
    layout = RoutingLayout(1000, 2, LAYERS)
    made: list[Any] = [RecordedExperts(layout, whole.copy()), None, RecordedExperts(layout, cached.copy())]
    fill_prompts(made, 4, [1, 1, 2])  # other weights drew the second, so they computed its prompt
    assert np.array_equal(made[2].experts, cached)
    fill_prompts(made, 4, [2, 1, 2])
    assert made[2].experts[:, 0, 0].tolist() == [100, 101, 102, 103, 104, 105]
    assert np.array_equal(made[0].experts, whole)


def test_the_first_row_of_a_token_stays_when_it_is_computed_again(runner: Runner, capture: ExpertCapture) -> None:
    """After a preemption, or a swap that drops the cache."""
    step(runner, (internal(ONE), 1, 0, 3))
    step(runner, (internal(ONE), 1, 3, 1))
    runner.mark = 500  # other weights
    step(runner, (internal(ONE), 1, 0, 5))
    assert taken(capture, f"0/{ONE}")[:, 0, 0].tolist() == [100, 101, 102, 103, 604]


def test_the_last_row_of_a_prompt_stays_until_a_token_is_drawn(runner: Runner, capture: ExpertCapture) -> None:
    """A swap between two chunks of a prompt makes the server compute the first one again, with the weights that draw the first token."""
    runner.prompt = 6
    step(runner, (internal(ONE), 1, 0, 4))
    runner.mark = 500  # other weights, and another request left the first token in the prefix cache
    step(runner, (internal(ONE), 1, 1, 4))
    step(runner, (internal(ONE), 1, 5, 1))
    runner.mark = 900
    step(runner, (internal(ONE), 1, 0, 7))
    assert taken(capture, f"0/{ONE}")[:, 0, 0].tolist() == [-1, 601, 602, 603, 604, 605, 1006]


def test_rows_that_nobody_fetches_take_limited_memory(runner: Runner, capture: ExpertCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_capture, "_MOST_BYTES", 3000)
    for number in range(9):
        step(runner, (internal(f"deltawire-{number:032x}"), 1, 0, 50))
        step(runner, (internal(ONE), 1, number, 1))  # it is still being computed
        assert sum(rows.nbytes for rows in capture._requests.values()) == capture._bytes <= 3000
    assert taken(capture, f"0/{ONE}")[:, 0, 0].tolist() == list(range(100, 109))
    assert capture.take(f"0/deltawire-{0:032x}") is None
    for number in range(1, 9):
        capture.take(f"0/deltawire-{number:032x}")
    assert capture._bytes == 0


def test_requests_that_nobody_fetches_are_forgotten(runner: Runner, capture: ExpertCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_capture, "_MOST_REQUESTS", 2)
    for number in range(4):
        step(runner, (internal(f"deltawire-{number:032x}"), 1, 0, 1))
    assert list(capture._requests) == [f"0/deltawire-{2:032x}", f"0/deltawire-{3:032x}"]


def test_steps_without_a_forward_pass_and_passes_outside_of_steps_are_left_out(runner: Runner, capture: ExpertCapture) -> None:
    assert step(runner) == "nothing"
    runner.hooks[1](Tensor([[7, 7]]))
    assert not capture._requests
    assert take_experts(SimpleNamespace(deltawire_expert_capture=capture), [f"0/{ONE}"]) == {}
    assert take_experts(SimpleNamespace(), [f"0/{ONE}"]) == {}


ROUTERS = ModelRouters(RoutingLayout(8, 2, LAYERS), 6)
GOOD = {"shape": [2, 2, 2], "data": base64.b64encode(np.array([0, 1, 2, 3, -1, -1, 4, 5], "<i2").tobytes()).decode()}


def test_an_answer_of_a_worker_is_read() -> None:
    found = read_captured_experts(GOOD, ROUTERS, 3).experts
    assert found.tolist() == [[[0, 1], [2, 3]], [[-1, -1], [4, 5]], [[-1, -1], [-1, -1]]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {**GOOD, "more": 1},
        {**GOOD, "shape": "x"},
        {**GOOD, "shape": [4, 2, 2]},
        {**GOOD, "shape": [-1, 2, 2]},
        {**GOOD, "shape": [2, 3, 2]},
        {**GOOD, "shape": [2, 2]},
        {**GOOD, "shape": [True, 2, 2]},
        {**GOOD, "data": GOOD["data"][:-4]},
        {**GOOD, "data": "****"},
        {**GOOD, "data": 5},
        {**GOOD, "data": base64.b64encode(np.full(8, 8, "<i2").tobytes()).decode()},
    ],
)
def test_an_answer_of_a_worker_that_does_not_fit_is_refused(answer: Any) -> None:
    with pytest.raises(EngineError):
        read_captured_experts(answer, ROUTERS, 3)
