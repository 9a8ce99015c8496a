"""`RouterReplay` under wrong input, copies of the model, and forward passes that fail."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from moe_models import another_routing, bits, moe_model, tokens
from test_router_replay import recorded

from deltawire.errors import UnusableRouting
from deltawire.rl.routing.router_replay import RouterReplay, lay_out

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda good: [good[0]], "experts of 1 sequences, but the attention mask has the shape"),
        (lambda good: [good[0], good[1], good[0]], "experts of 3 sequences"),
        (lambda good: [good[0] + 0.5, None], "not float64"),
        (lambda good: [good[0] > 1, None], "not bool"),
        (lambda good: [good[0] + (1 << 32), None], "which no model has"),  # the lower half of the number is a valid expert
        (lambda good: [np.full(good[0].shape, 2**64 - 1, np.uint64), None], "which no model has"),
    ],
)
def test_experts_that_cannot_be_laid_out_are_refused_and_not_converted(change, why):
    good = another_routing((2, 6, 2, 3), 8).numpy().astype(np.int64)
    with pytest.raises(UnusableRouting, match=why):
        lay_out(change(good), torch.ones(2, 6))


def test_an_attention_mask_in_bfloat16_is_read():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    experts, attention = recorded(model, ids), torch.ones(2, 6, dtype=torch.bfloat16)
    attention[0, :2] = 0
    with RouterReplay(model) as replay:
        replay.set(experts, attention)
        model(input_ids=ids)
        assert replay.take_counts().replayed == 2 * 10


def test_a_closed_replay_refuses_to_set_and_to_record():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    experts = recorded(model, ids)
    with RouterReplay(model) as replay:
        pass
    with pytest.raises(UnusableRouting, match="closed"):
        replay.set(experts)
    with pytest.raises(UnusableRouting, match="closed"), replay.record():
        pass


def test_another_replay_of_the_model_does_not_disturb_the_first():
    model, ids = moe_model("qwen3_moe"), tokens(1, 16)  # as many tokens as a router is tried with
    experts = recorded(model, ids)
    with RouterReplay(model) as replay, replay.record() as recording:
        replay.set(experts)
        RouterReplay(model).close()
        assert replay.take_counts().replayed == 0
        replay.set(experts[:, :5])
        RouterReplay(model).close()  # the router is tried with more tokens than are set
        with pytest.raises(UnusableRouting, match="nothing was recorded"):
            recording.take()


def test_a_deep_copy_of_the_model_chooses_itself():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    own = bits(model(input_ids=ids).logits)
    with RouterReplay(model) as replay, replay.record() as recording:
        replay.set(another_routing((12, 2, 3), 8))
        assert bits(copy.deepcopy(model)(input_ids=ids).logits) == own
        assert replay.take_counts().replayed == 0
        with pytest.raises(UnusableRouting, match="nothing was recorded"):
            recording.take()
        assert bits(model(input_ids=ids).logits) != own


def test_a_forward_pass_that_failed_half_way_gives_no_recording():
    def fail(*_):
        raise KeyError("half-way")

    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    whole = recorded(model, ids)
    with RouterReplay(model) as replay, replay.record() as recording:
        failing = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(input_ids=ids)
        with pytest.raises(UnusableRouting, match="half-way"):
            recording.take()
        with pytest.raises(KeyError):
            model(input_ids=ids)
        failing.remove()
        model(input_ids=ids)
        with pytest.raises(UnusableRouting, match="half-way"):
            recording.take()
        model(input_ids=ids)  # `take` has forgotten the passes that do not fit together
        assert recording.take().tobytes() == whole.tobytes()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("then", ["another forward pass", "another set", "clear"])
def test_checkpointed_layers_do_not_run_again_with_other_experts(reentrant, then):
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    experts = [another_routing((12, 2, 3), 8, seed) for seed in range(2)]
    with RouterReplay(model) as replay:
        replay.set(experts[0])
        first = model(input_ids=ids, use_cache=False).logits.sum()
        if then == "clear":
            replay.clear()
        else:
            replay.set(experts[1])
        if then == "another forward pass":  # as many layers have run with these experts as will run again
            model(input_ids=ids, use_cache=False)
        with pytest.raises(UnusableRouting, match="ran again after other experts were set"):
            first.backward()
        replay.set(experts[0])
        model(input_ids=ids, use_cache=False).logits.sum().backward()


def test_checkpointed_layers_run_again_after_a_forward_pass_on_another_thread():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(50):
        torch.ones(1, requires_grad=True).sum()  # autograd numbers the operations of each thread: this thread is ahead
    with RouterReplay(model) as replay, ThreadPoolExecutor(1) as other:
        replay.set(another_routing((12, 2, 3), 8))
        other.submit(lambda: model(input_ids=ids, use_cache=False).logits.sum()).result().backward()
        assert replay.take_counts().replayed == 24


def test_clearing_nothing_does_not_disturb_checkpointed_layers():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with RouterReplay(model) as replay:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
        replay.clear()
        loss.backward()


def test_experts_with_rows_and_columns_exchanged_are_refused():
    model = moe_model("qwen3_moe")
    with RouterReplay(model) as replay:
        with pytest.raises(UnusableRouting, match=r"experts for \[6, 2\] tokens, but the attention mask has the shape \[2, 6\]"):
            replay.set(another_routing((6, 2, 2, 3), 8), torch.ones(2, 6))
        replay.set(another_routing((12, 2, 3), 8), torch.ones(2, 6))
