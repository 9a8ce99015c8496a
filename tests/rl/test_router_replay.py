"""Replay of routing in real (tiny) transformers models. Comparisons are of bits."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tiny_models
from moe_models import CONFIGS, NAMED, another_routing, bits, gradients, moe_model, tokens

from deltawire.errors import UnsupportedRouting, UnusableRouting
from deltawire.rl.routing.router_replay import ReplayCounts, RouterReplay, lay_out

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EVERY = pytest.mark.parametrize("name", list(CONFIGS))
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def run(model, ids, attention=None, **more):
    """Return the bits of the logits and of all gradients."""
    out = model(input_ids=ids, attention_mask=attention, use_cache=False, **more).logits
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).reshape(out.shape)
    (out.float() * weights).sum().backward()
    return bits(out), gradients(model)


def recorded(model, ids, attention=None):
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        model(input_ids=ids, attention_mask=attention, use_cache=False)
        return recording.take().reshape(*ids.shape, len(replay.layers), replay.top_k)


@EVERY
@TYPES
def test_replay_of_ones_own_recording_is_the_identity(name, dtype):
    model, ids = moe_model(name, dtype=dtype), tokens(3, 7)
    expected = run(model, ids)
    experts = recorded(model, ids)
    assert len({tuple(sorted(row)) for row in experts.reshape(-1, experts.shape[-1]).tolist()}) > 5  # tokens differ in their experts
    with RouterReplay(model) as replay:
        replay.set(experts)
        assert run(model, ids) == expected
        replay.check_replayed()
        assert replay.take_counts() == ReplayCounts(replayed=21 * len(replay.layers), differing=0, unrecorded=0, damaged=0)
        replay.set(np.flip(experts, -1))  # a recording may not keep the order of the experts
        assert run(model, ids) == expected
    assert run(model, ids) == expected
    assert not any(module._forward_hooks for module in model.modules())


def weights_by_hand(name, logits, experts):
    """Return the weights as the model's paper defines them, for one token at a time."""
    rows = []
    sigmoids = torch.sigmoid(logits)  # of all tokens, because torch rounds the last elements of a tensor differently
    for token, sigmoid, chosen in zip(logits, sigmoids, experts, strict=True):
        if name.startswith("qwen3_moe"):
            weights = token.softmax(-1, dtype=torch.float32)[chosen]
            weights = (weights / weights.sum() if "not" not in name else weights).to(logits.dtype)
        elif name == "mixtral":
            weights = token.float().softmax(-1)[chosen]
            weights = weights / weights.sum()
        elif name.startswith("deepseek_v3"):
            weights = sigmoid[chosen]
            weights = 2.5 * (weights / (weights.sum() + 1e-20) if "not" not in name else weights)
        else:
            weights = token[chosen].softmax(-1)
        rows.append(weights)
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMED)
@TYPES
def test_replay_of_another_routing_equals_a_forward_written_by_hand(name, dtype):
    model, ids = moe_model(name, dtype=dtype), tokens(2, 6)
    own = run(model, ids)
    with RouterReplay(model) as replay:
        experts = another_routing((*ids.shape, len(replay.layers), replay.top_k), replay.experts)
        replay.set(experts)
        replayed = run(model, ids)
        assert 0 < replay.take_counts().differing <= 12 * len(replay.layers)
        routers = [each.module for each in replay._routers]
    assert replayed[0] != own[0]

    def by_hand(chosen):
        def forward(router, hidden):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            kind = torch.float32 if name.startswith("deepseek") else hidden.dtype
            logits = torch.nn.functional.linear(hidden.to(kind), router.weight.to(kind), getattr(router, "bias", None))
            own = original(router, hidden)[2]
            chosen_or_own = torch.stack([mine if set(mine.tolist()) == set(c.tolist()) else c for mine, c in zip(own, chosen, strict=True)])
            return logits, weights_by_hand(name, logits, chosen_or_own), chosen_or_own

        return forward

    original = type(routers[0]).forward
    for place, router in enumerate(routers):
        router.forward = types.MethodType(by_hand(experts[:, :, place].reshape(-1, experts.shape[-1]).long()), router)
    logits, grads = run(model, ids)
    assert logits == replayed[0]
    assert grads == replayed[1]
    assert any(name.endswith(("gate.weight", "router.weight")) for name in grads)  # gradients reach the routers


@EVERY
def test_another_routing_changes_what_every_supported_model_computes(name):
    model, ids = moe_model(name), tokens(2, 6)
    own, _ = run(model, ids)
    with RouterReplay(model) as replay:
        replay.set(another_routing((12, len(replay.layers), replay.top_k), replay.experts))
        assert run(model, ids)[0] != own


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("other", [False, True], ids=["own", "other"])
def test_checkpointed_layers_replay_the_same_rows_in_micro_batches(name, reentrant, other):
    model = moe_model(name)
    parts = [tokens(2, 5, seed) for seed in range(3)]
    with RouterReplay(model) as replay:
        shape = (2, 5, len(replay.layers), replay.top_k)
        experts = [another_routing(shape, replay.experts, seed) if other else recorded(model, part) for seed, part in enumerate(parts)]

    def train(with_replay):
        with RouterReplay(model) as replay:
            for ids, rows in zip(parts, experts, strict=True):
                if with_replay:
                    replay.set(rows)
                model(input_ids=ids, use_cache=False).logits.float().square().sum().backward()
            return gradients(model), replay.take_counts()

    plain, counted = train(other)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed, counted_again = train(True)
    assert checkpointed == plain
    if other:
        assert counted_again == counted  # layers that run again are counted once


def test_a_backward_pass_after_the_next_set_is_refused_if_layers_run_again():
    model = moe_model("qwen3_moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = [tokens(2, 5, seed) for seed in range(2)]
    experts = [recorded(model, part) for part in parts]
    with RouterReplay(model) as replay:
        replay.set(experts[0])
        first = model(input_ids=parts[0], use_cache=False).logits.sum()
        replay.set(experts[1])
        with pytest.raises(UnusableRouting, match="Call backward before the next set"):
            first.backward()
        replay.set(experts[0])
        first = model(input_ids=parts[0], use_cache=False).logits.sum()
        replay.set(experts[1])
        second = model(input_ids=parts[1], use_cache=False).logits.sum()
        with pytest.raises(UnusableRouting, match="Call backward before the next set"):
            (first + second).backward()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(side):
    model = moe_model("qwen3_moe")
    lengths = [7, 4, 5]
    sequences = [tokens(1, length, seed) for seed, length in enumerate(lengths)]
    alone = [recorded(model, each)[0] for each in sequences]
    ids, attention = torch.zeros((3, 7), dtype=torch.long), torch.zeros((3, 7), dtype=torch.long)
    for row, each in enumerate(sequences):
        here = slice(7 - each.shape[1], 7) if side == "left" else slice(0, each.shape[1])
        ids[row, here], attention[row, here] = each[0], 1
    experts = lay_out(alone, attention)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    expected = run(model, ids, attention, position_ids=positions)
    with RouterReplay(model) as replay:
        replay.set(experts, attention)
        assert run(model, ids, attention, position_ids=positions) == expected
        assert replay.take_counts() == ReplayCounts(replayed=sum(lengths) * 2, differing=0, unrecorded=0, damaged=0)
        other = lay_out([another_routing(each.shape, 8, row) for row, each in enumerate(alone)], attention)
        replay.set(other, attention)
        with replay.record() as recording:
            run(model, ids, attention, position_ids=positions)
        made = recording.take().reshape(other.shape)
        assert (np.sort(made, -1) == np.sort(other, -1))[attention.bool().numpy()].all()


def test_a_packed_batch():
    model = moe_model("mixtral")
    sequences = [tokens(1, length, length) for length in (4, 6, 3)]
    packed = torch.cat(sequences, 1)
    positions = torch.cat([torch.arange(each.shape[1]) for each in sequences])[None]
    expected = run(model, packed, position_ids=positions)
    experts = np.concatenate([recorded(model, each)[0] for each in sequences])
    with RouterReplay(model) as replay:
        replay.set(experts)
        assert run(model, packed, position_ids=positions) == expected
        assert replay.take_counts().differing == 0


def test_rows_that_were_not_recorded_or_are_damaged_are_the_models_own():
    model, ids = moe_model("gpt_oss"), tokens(2, 6)
    expected = run(model, ids)
    experts = recorded(model, ids)
    experts[0, 0] = -1
    experts[0, 1, 0] = [3, -1, 2]
    experts[0, 2] = 0  # a known bug of engines
    experts[1, 3, 1] = [5, 1, 5]
    with RouterReplay(model) as replay:
        replay.set(experts)
        assert run(model, ids) == expected
        assert replay.take_counts() == ReplayCounts(replayed=24 - 6, differing=0, unrecorded=3, damaged=3)
        assert replay.take_counts() == ReplayCounts(0, 0, 0, 0)
        replay.clear()
        assert run(model, ids) == expected


def test_a_row_of_zeros_is_a_choice_if_a_token_has_one_expert():
    kind, sizes = CONFIGS["mixtral"]
    config = transformers.AutoConfig.for_model(kind, **sizes | {"num_experts_per_tok": 1}, pad_token_id=None)
    model, ids = transformers.AutoModelForCausalLM.from_config(config), tokens(1, 5)
    with RouterReplay(model) as replay, replay.record() as recording:
        replay.set(np.zeros((5, 2, 1), np.uint8))
        run(model, ids)
        assert not recording.take().any()


def test_the_layers_of_an_engine_include_those_without_routers():
    model, ids = moe_model("deepseek_v3"), tokens(1, 6)
    expected = run(model, ids)
    experts = recorded(model, ids)[0]
    assert experts.shape == (6, 2, 3)
    absolute = np.concatenate([np.zeros((6, 1, 3), np.uint8), experts.astype(np.uint8)], 1)  # vLLM gives zeros for layer 0
    with RouterReplay(model) as replay:
        assert replay.layers == (1, 2)
        replay.set(absolute)
        assert run(model, ids) == expected
        assert replay.take_counts() == ReplayCounts(replayed=12, differing=0, unrecorded=0, damaged=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda good: good.astype(np.float32), "integers"),
        (lambda good: good[0, 0], "integers"),
        (lambda good: good[..., :2], "2 experts per token were recorded, but the model chooses 3"),
        (lambda good: good[:, :, :1], "1 layers were recorded, but 2 layers"),
        (lambda good: np.concatenate([good, good], 2), "4 layers were recorded"),
        (lambda good: np.where(good == good.max(), 8, good), "but the model has 8"),
        (lambda good: np.where(good == 0, -2, good), "experts from -2"),
        (lambda good: np.full_like(good, 2**31 - 1), "but the model has 8"),
        (lambda good: torch.from_numpy(good).bfloat16(), "not an array of integers"),
        (lambda good: [good[0, 0].tolist(), good[0, 0, :1].tolist()], "not an array of integers"),
        (lambda good: good[:, :, :0], "0 layers were recorded"),
        (lambda good: np.full(good.shape, 2**63 + 5, np.uint64), "but the model has 8"),
    ],
)
def test_experts_that_do_not_fit_the_model_are_refused_before_anything_runs(change, why):
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    experts = recorded(model, ids)
    with RouterReplay(model) as replay:
        replay.set(experts)
        with pytest.raises(UnusableRouting, match=why):
            replay.set(change(experts))
        assert run(model, ids) == run(model, ids)  # the experts from before still count
        assert replay.take_counts().replayed == 2 * 24


def test_experts_of_another_number_of_tokens_are_refused():
    model, ids = moe_model("qwen3_moe"), tokens(2, 6)
    experts = recorded(model, ids)
    with RouterReplay(model) as replay:
        replay.set(experts[:1])
        with pytest.raises(UnusableRouting, match="experts for 6 tokens, but the model was given 12"):
            model(input_ids=ids)
        with pytest.raises(UnusableRouting, match="attention mask has 6"):
            replay.set(experts, torch.ones(6))
    with pytest.raises(UnusableRouting, match="a sequence has 6 tokens, but the experts of 5"):
        lay_out([experts[0][:5]], torch.ones(1, 6))
    with pytest.raises(UnusableRouting, match="shapes"):
        lay_out([experts[0], experts[1][:, :1]], torch.ones(2, 6))
    assert lay_out([None, None], torch.ones(2, 6)) is None
    mixed = lay_out([None, experts[1]], torch.ones(2, 6))
    assert (mixed[0] == -1).all()
    assert (mixed[1].numpy() == experts[1]).all()


def test_a_router_that_does_not_run_is_noticed():
    model, ids = moe_model("gpt_oss"), tokens(1, 4)
    experts = recorded(model, ids)
    with RouterReplay(model) as replay:
        replay.set(experts)
        with pytest.raises(UnusableRouting, match="the router of layer 0 did not run"):
            replay.check_replayed()


UNSUPPORTED = {
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "jamba": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
}


@pytest.mark.parametrize("kind", list(UNSUPPORTED))
def test_models_whose_routing_is_not_known_are_refused(kind):
    sizes = {name: size for name, size in tiny_models.SIZES.items() if kind == "llama4_text" or name != "head_dim"}
    config = transformers.AutoConfig.for_model(kind, **sizes, **UNSUPPORTED[kind], pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedRouting):
        RouterReplay(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_dense_model_has_nothing_to_replay():
    with pytest.raises(UnsupportedRouting, match="names no router class"):
        RouterReplay(tiny_models.qwen())


@pytest.mark.parametrize("change", ["bias in the weights", "another type", "noise in training"])
def test_a_router_that_differs_a_little_is_refused(monkeypatch, change):
    model = moe_model("deepseek_v3" if change == "bias in the weights" else "qwen3_moe")
    kind = type(next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp.gate")))
    original = kind.forward

    def forward(router, hidden):
        logits, weights, experts = original(router, hidden)
        if change == "bias in the weights":
            weights = weights + router.e_score_correction_bias[experts]
        elif change == "another type":
            weights = weights.float()
        elif router.training:
            weights = weights * 1.01
        return logits, weights, experts

    monkeypatch.setattr(kind, "forward", forward)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()  # the difference does not show with the model's present values
    with pytest.raises(UnsupportedRouting, match="weights its experts in a way"):
        RouterReplay(model)


def test_recording_joins_forward_passes_and_records_replayed_experts():
    model, ids = moe_model("qwen3_moe"), tokens(1, 6)
    whole = recorded(model, ids)[0]
    with RouterReplay(model) as replay, replay.record() as recording, torch.no_grad():
        first = model(input_ids=ids[:, :4], use_cache=True)
        for position in (4, 5):
            model(input_ids=ids[:, position : position + 1], past_key_values=first.past_key_values, use_cache=True)
        assert recording.take().tobytes() == whole.tobytes()
        with pytest.raises(UnusableRouting, match="nothing was recorded"):
            recording.take()
        other = another_routing((6, 2, 3), 8)
        replay.set(other)
        model(input_ids=ids)
        assert (np.sort(recording.take(), -1) == np.sort(other.numpy(), -1)).all()
    model(input_ids=ids)
    with pytest.raises(UnusableRouting):
        recording.take()


def test_a_model_within_ddp_replays_too():
    import torch.distributed as dist

    model, ids = moe_model("deepseek_v3"), tokens(2, 6)
    expected = run(model, ids)
    experts = another_routing((2, 6, 2, 3), 8)
    with RouterReplay(model) as replay:
        replay.set(experts)
        other = run(model, ids)
    assert other != expected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        with RouterReplay(wrapped) as replay:
            assert replay.all_layers == 3
            replay.set(experts)
            out = wrapped(input_ids=ids, use_cache=False).logits
            assert bits(out) == other[0]
            out.sum().backward()
    finally:
        dist.destroy_process_group()
