"""A vLLM server that sends hostile routed experts, or none, still gives completions, and an event says why they have no routing."""

from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltawire import Publisher, Version
from deltawire.engines.routed_experts import ModelRouters
from deltawire.engines.vllm.driver import generation
from deltawire.engines.vllm.driver.generation import VllmGenerator
from deltawire.errors import EngineError
from deltawire.events import Event
from deltawire.fleet.generation import Generated
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.routing import RoutingLayout
from deltawire.store.memory import MemoryStore

ROUTERS = ModelRouters(RoutingLayout(8, 2, (0, 1)), 2)
ROWS = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 2], [3, 4]]], np.uint8)
PROMPT, TOKENS = 2, [5, 6]


def npy(rows: Any) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


class Scene:
    """A generator that is not connected, and reads answers that the test makes up."""

    def __init__(self) -> None:
        store = MemoryStore("memory://generator")
        with Publisher(store) as publisher:
            version = publisher.publish({"weight": np.zeros(8, np.float32)})
        assert isinstance(version, Version)
        self.version = version
        self.events: list[Event] = []
        self.generator = VllmGenerator(store, "http://127.0.0.1:9", routing=True, on_event=self.events.append)

    def read(self, routers: ModelRouters | None = ROUTERS, **fields: Any) -> Generated:
        choice = {
            "index": 0,
            "token_ids": TOKENS,
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
            "finish_reason": "length",
            "weight_versions": [{"start": 0, "end": 2, "version": str(self.version.seq)}],
            **fields,
        }
        (made,) = self.generator._read({"choices": [choice]}, Sampling(samples=1, max_tokens=2), self.version, routers, PROMPT)
        assert made.tokens.tolist() == TOKENS
        return made

    def reasons(self) -> list[str]:
        return [str(event.fields["reason"]) for event in self.events if event.name == "routing-unusable"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(generation, "Prompts", SimpleNamespace(of=lambda _: None))  # the chain has no tokenizer, and none is needed
    scene = Scene()
    yield scene
    scene.generator.close()


def test_experts_that_fit_are_read(scene: Scene) -> None:
    made = scene.read(routed_experts=npy(ROWS))
    assert made.routing is not None
    assert np.array_equal(made.routing.experts[:3], ROWS)
    assert scene.reasons() == []


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (None, "does not send"),
        (5, "not a text"),
        ([[[0, 1]]], "not a text"),
        ("A" * 4_000_000, "not a text"),
        ("****", "base64"),
        (npy(ROWS[:2]), "shape"),
        (npy(ROWS[:, :1]), "shape"),
        (npy(ROWS + 8), "8 experts"),
        (npy(ROWS.astype(np.int32) - 9), "8 experts"),
        ({"shape": [1 << 60, 2, 2], "data": ""}, "shape"),
        ({"shape": [3, 2, 2], "data": "A" * 4_000_000}, "not a text"),
        ({"shape": [3, 2, 2]}, "cannot be read"),
    ],
)
def test_hostile_experts_and_none_leave_a_completion_without_routing(scene: Scene, experts: Any, reason: str) -> None:
    tracemalloc.start()
    try:
        for _ in range(2):
            assert scene.read(routed_experts=experts).routing is None
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert len(scene.reasons()) == 1  # the second time would say the same
    assert reason in scene.reasons()[0]


def test_a_model_without_routers_needs_no_experts(scene: Scene) -> None:
    assert scene.read(None, routed_experts=npy(ROWS)).routing is None
    assert "no routers" in scene.reasons()[0]


@pytest.mark.parametrize("spans", [[(0, 1 << 60)], [(0, 1)], [(1, 2)], [(0, 2), (2, 1 << 60)], [(0, 3), (3, 2)], [(0, -5), (-5, 2)]])
def test_versions_of_tokens_that_are_not_there_are_refused_without_memory(scene: Scene, spans: list[tuple[int, int]]) -> None:
    with pytest.raises(EngineError, match="every token"):
        scene.read(weight_versions=[{"start": start, "end": end, "version": "1"} for start, end in spans])
