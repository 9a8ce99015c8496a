"""Router replay: what it takes away of the mismatch between an engine and a trainer, and what it costs.

    python benchmarks/router_replay.py                          # 112 M weights, on the CPU
    python benchmarks/router_replay.py --device cuda --rows 16

The model is a Qwen3-MoE with random weights, whose routers and head are scaled so that its distributions are as sharp as trained ones.
The engine is the model in another precision: bfloat16, or float32 with weights that were rounded to fp8 (e4m3). It draws tokens one by one,
with a KV cache, and records its experts. The trainer has the same weights and computes all positions of a sequence at once.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from report import Table, keep, show

from deltawire.rl.routing.router_replay import RouterReplay

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 160,
    "intermediate_size": 160,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
}


def model_of(dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**_SIZES, pad_token_id=None, eos_token_id=None, bos_token_id=None)
    model = transformers.Qwen3MoeForCausalLM(config).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.copy_(torch.randn_like(weight) * _SIZES["hidden_size"] ** -0.5)
            elif name == "lm_head.weight":
                weight.mul_(4)
            elif weight.dim() > 1:
                weight.mul_(2)
    return model.to(dtype)


def rounded_to_fp8(model: Any) -> Any:
    """Return a copy whose experts were rounded to fp8, one scale for each output channel."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)
    return model


@torch.no_grad()
def draw(engine: Any, rows: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    """Draw tokens one by one. Return ids [rows, length], the log-probs of all but the first, and experts, −1 for the last token."""
    chance = torch.Generator(device=device).manual_seed(1)
    ids = torch.randint(0, _SIZES["vocab_size"], (rows, 1), device=device, generator=chance)
    cache, logprobs, experts = None, [], []
    with RouterReplay(engine) as replay, replay.record() as recording:
        for _ in range(length - 1):
            out = engine(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            told = out.logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(told.exp(), 1, generator=chance)
            logprobs.append(told.gather(-1, token))
            experts.append(recording.take())
            ids = torch.cat([ids, token], 1)
        last = np.full_like(experts[0], -1)
    return ids, torch.cat(logprobs, 1), np.stack([*experts, last], 1)


def k3(trainer: torch.Tensor, engine: torch.Tensor) -> tuple[float, float, float]:
    """Return the KL estimate, and the mean and largest difference of log-probs."""
    drift = (trainer - engine).double()
    return float((drift.expm1() - drift).mean()), float(drift.abs().mean()), float(drift.abs().max())


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def seconds(works: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Return the median time of each work, which take turns, after one turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def measure(device: str = "cpu", rows: int = 8, length: int = 128, repeats: int = 5) -> Table:
    table = Table(
        "router-replay",
        "Mismatch of an MoE trainer with its engine, without and with replay",
        ["engine", "decisions that differ", "tokens touched", "k3 KL", "with replay", "mean, max |Δlogp|", "with replay"],
    )
    masters = model_of(torch.float32, device)
    trainer = copy.deepcopy(masters).to(torch.bfloat16)
    engines = {
        "bf16, token by token": (copy.deepcopy(trainer), trainer),
        "bf16, trainer in float32": (copy.deepcopy(trainer), masters),
        "experts in fp8": (rounded_to_fp8(trainer), trainer),
    }
    for name, (engine, learner) in engines.items():
        ids, drawn, experts = draw(engine, rows, length, device)
        with torch.no_grad(), RouterReplay(learner) as replay, replay.record() as recording:
            own = k3(logprobs_of(learner, ids), drawn)
            chosen = recording.take().reshape(experts.shape)[:, :-1]
            differs = (np.sort(chosen, -1) != np.sort(experts[:, :-1], -1)).any(-1)
            replay.set(experts)
            with_replay = k3(logprobs_of(learner, ids), drawn)
        table.rows.append(
            [
                name,
                f"{differs.mean():.1%}",
                f"{differs.any(-1).mean():.0%}",
                f"{own[0]:.2e}",
                f"{with_replay[0]:.2e}",
                f"{own[1]:.3f}, {own[2]:.2f}",
                f"{with_replay[1]:.3f}, {with_replay[2]:.2f}",
            ]
        )
    load = os.getloadavg()[0]
    table.notes.append(_costs(trainer, ids, experts, device, repeats))
    table.notes.append(f"The machine has {os.cpu_count()} cores; its load was {load:.1f} when the times were measured.")
    return table


def _costs(model: Any, ids: torch.Tensor, experts: np.ndarray[Any, Any], device: str, repeats: int) -> str:
    def step() -> None:
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad()

    def recorded() -> None:
        with RouterReplay(model) as replay, replay.record() as recording:
            step()
            recording.take()

    def replayed() -> None:
        with RouterReplay(model) as replay:
            replay.set(experts)
            step()
            replay.take_counts()

    def attached() -> None:
        RouterReplay(model).close()

    found = seconds({"plain": step, "recording": recorded, "replay": replayed, "attaching": attached}, device, repeats)
    once = found["attaching"]
    shares = {name: (found[name] - once) / found["plain"] - 1 for name in ("recording", "replay")}
    weights = sum(weight.numel() for weight in model.parameters())
    return (
        f"Forward and backward pass of {ids.numel():,} tokens through {weights / 1e6:.0f} M weights: {found['plain'] * 1e3:.0f} ms, "
        f"with recording {shares['recording']:+.1%}, with replay {shares['replay']:+.1%}. Attaching takes {once * 1e3:.0f} ms, once."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--keep", action="store_true", help="write the table to results/ and to docs/benchmarks.md")
    given = options.parse_args()
    table = measure(given.device, given.rows, given.length, given.repeats)
    show(table)
    if given.keep:
        keep(table)


if __name__ == "__main__":
    main()
