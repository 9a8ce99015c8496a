"""Recorded experts belong to the right tokens: under padding, after rows have left the batch, and when the weights change in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from moe_models import moe_model
from tiny_models import qwen, torch

from deltawire.chain.version import Version
from deltawire.errors import UnsupportedRouting
from deltawire.events import Event
from deltawire.fleet.generation import Generated
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.routing import RoutingLayout
from deltawire.rl.generation import open_recorder
from deltawire.rl.routing.router_replay import RouterReplay
from deltawire.rl.routing.routing_recorder import RoutingRecorder, layout_of_model
from deltawire.rl.sampling import sample

PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22]]


def versions(*seqs: int) -> Any:
    """Return the context of forward passes whose weights are of these versions, and then always of the last one."""
    left = list(seqs)

    @contextlib.contextmanager
    def one_pass() -> Iterator[Version]:
        seq: Any = SimpleNamespace(seq=left.pop(0) if len(left) > 1 else left[0])
        yield seq

    return one_pass


def experts_of(model: Any, tokens: list[int]) -> Any:
    """Return the experts of one plain forward pass, without padding or cache."""
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        model(torch.tensor([tokens]))
        return recording.take()


def check(model: Any, prompt: list[int], made: Generated, *, until: int | None = None) -> None:
    whole = [*prompt, *made.tokens.tolist()]
    assert made.routing is not None
    found = made.routing.experts
    assert found.shape[0] == len(whole)
    assert (found[-1] == -1).all()
    assert np.array_equal(np.sort(found[:-1][:until], -1), np.sort(experts_of(model, whole)[:-1][:until], -1))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_every_token_has_the_experts_that_processed_it(name: str) -> None:
    model = moe_model(name).eval()
    recorder = RoutingRecorder(model)
    stop = set(range(1, 60))  # rows end early, and leave the batch
    made = sample(model, PROMPTS, Sampling(2, 12), forward_pass=versions(1), stop_tokens=stop, recorder=recorder)
    assert len({len(each.tokens) for each in made}) > 1
    for number, each in enumerate(made):
        check(model, PROMPTS[number // 2], each)


def test_tokens_keep_the_routing_of_the_version_that_processed_them() -> None:
    model, newer = moe_model("qwen3_moe").eval(), moe_model("qwen3_moe", seed=1).eval()
    recorder = RoutingRecorder(model)
    passes = versions(*[1] * 4, 2)

    @contextlib.contextmanager
    def swapping() -> Iterator[Version]:
        with passes() as version:
            if version.seq == 2:
                model.load_state_dict(newer.state_dict())
            yield version

    older = moe_model("qwen3_moe").eval()
    (made,) = sample(model, [[5, 6, 7]], Sampling(1, 9), forward_pass=swapping, recorder=recorder)
    assert [(span.start, span.end, span.version.seq) for span in made.spans] == [(0, 4, 1), (4, 9, 2)]
    whole = [5, 6, 7, *made.tokens.tolist()]
    assert made.routing is not None
    found = np.sort(made.routing.experts, -1)
    assert np.array_equal(found[:6], np.sort(experts_of(older, whole)[:6], -1))  # the prompt and the three tokens that version 1 processed
    assert not np.array_equal(found[6:-1], np.sort(experts_of(older, whole)[6:-1], -1))


def test_the_layout_names_the_layers_that_have_experts() -> None:
    assert layout_of_model(moe_model("deepseek_v3")) == RoutingLayout(8, 3, (1, 2))
    assert RoutingRecorder(moe_model("qwen3_moe")).layout == RoutingLayout(8, 3, (0, 1))
    assert layout_of_model(qwen()) is None


def test_a_model_without_routers_is_told_and_generates_without_them() -> None:
    with pytest.raises(UnsupportedRouting):
        RoutingRecorder(qwen())
    events: list[Event] = []
    assert open_recorder(qwen(), events.append) is None
    assert [event.name for event in events] == ["routing-unusable"]
    (made,) = sample(qwen(), [[1, 2]], Sampling(1, 2), forward_pass=versions(1))
    assert made.routing is None


def test_recording_changes_no_token() -> None:
    model = moe_model("qwen3_moe").eval()
    plain = sample(model, PROMPTS, Sampling(1, 8), forward_pass=versions(1))
    recorder = RoutingRecorder(model)
    recorded = sample(model, PROMPTS, Sampling(1, 8), forward_pass=versions(1), recorder=recorder)
    recorder.close()
    for one, other in zip(plain, recorded, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
