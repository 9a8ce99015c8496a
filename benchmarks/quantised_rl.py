"""GRPO with quantised policies: the reward after equal steps, and the mismatch, with and without importance weights.

    python benchmarks/quantised_rl.py --folder /tmp/rl                # the demo's model, on the CPU
    python benchmarks/quantised_rl.py --model demo-256 --folder /tmp/rl-256
    python benchmarks/quantised_rl.py --model large --device cuda     # 107 M weights, on a GPU

All runs start from the same pre-trained weights and draw the same prompts. They take turns, one step at a time, until the steps or the
seconds are over, so all runs have the same number of steps. With `--folder`, each run makes all its steps at once, and its steps are kept
in the folder. After an interruption, the same command makes the runs that are missing there.

A step is synchronous: the policy that draws the tokens has the weights of the trainer, quantised. It computes in bfloat16, and the trainer
computes in float32 (on a GPU: TF32). Scales stay from step to step, as those of publishers do.

On a CPU the policy is quantised by `quantise_state` and dequantised as a member does it. On a GPU it is computed by served_weights.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from report import Table, keep, show
from served_weights import Kept, copy_served, named

from deltawire.dtypes import dtype_named
from deltawire.quantise import QuantisedLayout, Recipe, dequantise_state, quantise_state
from deltawire.quantise.recipe import SPELLINGS
from deltawire.rl.grpo import GrpoLoss, group_advantages, token_logprobs
from deltawire.rl.mismatch import TokenMismatch
from deltawire.tensors.torch_types import to_torch

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import policy as demo_policy  # noqa: E402
import task  # noqa: E402

_MICRO_BATCH = 64
"""The number of completions that go through the model together."""
RUNS = tuple(recipe + minus for recipe in ("bf16", *SPELLINGS) for minus in ("", "-"))
"""Recipes. With a minus, tokens have no importance weights."""


@dataclass(frozen=True)
class Size:
    """The size of a benchmark."""

    width: int
    layers: int
    heads: int
    pretraining_steps: int
    rows: int
    columns: int
    pretraining_rate: float
    prompts: int
    samples: int
    tokens: int
    learning_rate: float


SIZES = {
    "demo": Size(demo_policy.WIDTH, demo_policy.LAYERS, 4, 100, 24, 96, 2e-3, 6, 8, 24, 1e-5),
    "demo-256": Size(256, demo_policy.LAYERS, 4, 100, 24, 96, 2e-3, 6, 8, 24, 1e-5),
    "large": Size(768, 14, 12, 400, 64, 192, 3e-4, 16, 16, 24, 1e-5),
}
"""`demo` has the size of the demo's model. Its rows of 192 and 576 weights are not whole groups of int4-128, so `demo-256` is wider."""


def runs_of(model_name: str) -> list[str]:
    """Return the runs that a benchmark makes by default: all, or only those of int4-128, which the other model cannot have, beside bf16."""
    if model_name == "demo-256":
        return [name for name in RUNS if name.removesuffix("-") in ("bf16", "int4-128")]
    return [name for name in RUNS if _fits(name, SIZES[model_name])]


def _fits(name: str, size: Size) -> bool:
    recipe = name.removesuffix("-")
    group = None if recipe == "bf16" else Recipe.parse(recipe).group_size
    return not group or size.width % group == 0


@dataclass
class Run:
    """A trainer, the policy that it serves, and what was measured in each step."""

    name: str
    model: Any
    served: Any
    optimizer: torch.optim.Optimizer
    loss: GrpoLoss
    layout: QuantisedLayout | None
    published: dict[str, Any] | None = None
    kept: Kept = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, model: Any, size: Size) -> Run:
        recipe = name.removesuffix("-")
        own, served = copy.deepcopy(model), copy.deepcopy(model).eval().requires_grad_(False)
        for parameter in served.parameters():
            parameter.data = parameter.data.bfloat16()
        specs = {each: (dtype_named("F32"), tuple(weight.shape)) for each, weight in named(own).items()}
        layout = None if recipe == "bf16" else QuantisedLayout.of(recipe, specs)
        optimizer = torch.optim.AdamW(own.parameters(), lr=size.learning_rate, weight_decay=0.0, fused=True)
        return cls(name, own, served, optimizer, GrpoLoss(importance_sampling_correction=not name.endswith("-")), layout)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the served policy to the weights of the trainer."""
        weights, served = named(self.model), named(self.served)
        if self.layout is None:
            for name, weight in weights.items():
                served[name].copy_(weight)
        elif self.model.device.type == "cpu":
            self.published = quantise_state(weights, self.layout.recipe, previous=self.published)
            for name, weight in dequantise_state(self.published, self.layout, "bfloat16").items():
                served[name].copy_(to_torch(weight))
        else:
            copy_served(self.layout, weights, served, self.kept)

    def draw(self, ids: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens from the served policy. Return them with their log-probs."""
        return complete(self.served, ids, count, seed)

    def logprobs(self, whole: torch.Tensor, here: slice) -> torch.Tensor:
        """Return the log-probs of some rows in the trainer's policy."""
        return token_logprobs(self.model, whole[here], torch.ones_like(whole[here]))

    def step(self, ids: torch.Tensor, size: Size, seed: int) -> None:
        start = time.monotonic()
        self.publish()
        published = time.monotonic()
        tokens, behaviour = self.draw(ids, size.tokens, seed)
        drawn = time.monotonic()
        rewards = torch.tensor(task.known_words(task_tokenizer().batch_decode(tokens.tolist())), dtype=torch.float64)
        groups = torch.arange(len(ids)) // size.samples
        advantages = group_advantages(rewards, groups).float().to(ids.device)
        whole = torch.cat([ids, tokens], -1)
        mask = torch.zeros(whole.shape[0], whole.shape[1] - 1, dtype=torch.bool, device=ids.device)
        mask[:, ids.shape[1] - 1 :] = True
        padded = torch.zeros_like(mask, dtype=torch.float32)
        padded[:, ids.shape[1] - 1 :] = behaviour
        self.optimizer.zero_grad()
        total = int(mask.sum())
        parts = []
        for start_row in range(0, len(whole), _MICRO_BATCH):
            here = slice(start_row, start_row + _MICRO_BATCH)
            current = self.logprobs(whole, here)
            terms = self.loss(current, padded[here], advantages[here], mask[here], tokens=total)
            terms.loss.backward()
            drift, truncated = (each[mask[here]].cpu().numpy() for each in (terms.drift.double(), terms.is_truncated))
            parts.append(TokenMismatch(drift, truncated, np.zeros(len(drift), np.int64), np.zeros(len(drift), np.int64)))
        mismatch = TokenMismatch.join(parts).measure()
        assert mismatch is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps.append(
            {
                "reward": float(rewards.mean()),
                "mismatch_kl": mismatch.kl,
                "truncated": mismatch.truncated_ratio,
                "logp_difference_max": mismatch.logp_difference_max,
                "ess": mismatch.ess,
                "publish_seconds": published - start,
                "draw_seconds": drawn - published,
                "train_seconds": time.monotonic() - drawn,
            }
        )


_TOKENIZER: list[Any] = []


def task_tokenizer() -> Any:
    if not _TOKENIZER:
        _TOKENIZER.append(task.tokenizer())
    return _TOKENIZER[0]


@torch.inference_mode()
def complete(model: Any, ids: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `count` tokens after each row. Return them with their log-probs, as a member does."""
    chance = torch.Generator(ids.device).manual_seed(seed)
    tokens, logprobs, cache, given = [], [], None, ids
    for _ in range(count):
        answer = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        chances = answer.logits[:, -1].float().log_softmax(-1)
        given = torch.multinomial(chances.exp(), 1, generator=chance)
        tokens.append(given)
        logprobs.append(chances.gather(-1, given))
    return torch.cat(tokens, -1), torch.cat(logprobs, -1)


def new_model(size: Size, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=len(task.LETTERS),
        max_position_embeddings=256,
        initializer_range=size.width**-0.5 if size.width < 512 else 0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def pretrain(model: Any, size: Size, steps: int) -> float:
    """Train the model on the documentation, letter by letter. Return the last loss in nats per letter."""
    letters = torch.tensor(task_tokenizer()(task.text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.pretraining_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss = torch.zeros(())
    for step in range(steps):
        starts = torch.randint(0, len(letters) - size.columns, (size.rows,))
        batch = torch.stack([letters[start : start + size.columns] for start in starts.tolist()]).to(model.device)
        for group in optimizer.param_groups:
            group["lr"] = size.pretraining_rate * min(1.0, (step + 1) / 20) * (1 - 0.95 * step / steps)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def take_turns(runs: Sequence[Run], size: Size, steps: int, deadline: float, seed: int = 0) -> None:
    """Let each run make one step at a time, with prompts by the seed. Stop before the deadline, which is a time of `time.time`."""
    rows = [row["prompt"] for row in task.rows()]
    for step in range(steps):
        turn = time.time()
        chance = step + 1_000_000 * seed
        prompts = random.Random(chance).sample(rows, size.prompts)
        ids = torch.tensor(task_tokenizer()(prompts)["input_ids"]).repeat_interleave(size.samples, 0).to(runs[0].model.device)
        for run in runs:
            run.step(ids, size, seed=chance)
        now = time.time()
        if step % 20 == 0:
            print(f"step {step + 1}:", *(f"{run.name} {run.steps[-1]['reward']:.3f}" for run in runs), flush=True)
        if now + 1.2 * (now - turn) > deadline:
            break


def pretrained(folder: Path | None, model: Any, size: Size, steps: int) -> Any:
    """Return the model after pre-training. If there is a folder, the weights are kept there."""
    file = None if folder is None else folder / "pretrained.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file))
        return model
    began = time.time()
    loss = pretrain(model, size, steps)
    print(f"pre-training: loss {loss:.2f} nats per letter after {time.time() - began:.0f} s", flush=True)
    if file is not None:
        torch.save(model.state_dict(), file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)
    return model


def kept_steps(folder: Path, name: str, model: Any, size: Size, steps: int) -> list[dict[str, float]]:
    """Return the steps of a run. The run is made if the folder lacks it, or has fewer steps of it."""
    file = folder / f"{name}.json"
    if file.exists() and len(found := json.loads(file.read_text())) >= steps:
        return found[:steps]
    began = time.time()
    run = Run.of(name, model, size)
    take_turns([run], size, steps, math.inf)
    print(f"{name}: {time.time() - began:.0f} s", flush=True)
    file.with_suffix(".new").write_text(json.dumps(run.steps))
    file.with_suffix(".new").rename(file)
    return run.steps


def measure(
    model_name: str = "demo",
    *,
    device: str = "cpu",
    steps: int = 120,
    seconds: float = 3600.0,
    pretraining: int | None = None,
    names: Sequence[str] | None = None,
    folder: Path | None = None,
) -> Table:
    """Make all runs, for this many steps or until the seconds are over. With a folder, make only runs that are missing there."""
    deadline = time.time() + seconds
    size = SIZES[model_name]
    names = runs_of(model_name) if names is None else names
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    model = pretrained(folder, new_model(size, device), size, size.pretraining_steps if pretraining is None else pretraining)
    weights = sum(weight.numel() for weight in model.parameters())
    if folder is not None:
        done = {name: kept_steps(folder, name, model, size, steps) for name in names}
    else:
        runs = [Run.of(name, model, size) for name in names]
        take_turns(runs, size, steps, deadline)
        done = {run.name: run.steps for run in runs}
    return _table(model_name, weights, device, done)


def _table(model_name: str, weights: int, device: str, steps: dict[str, list[dict[str, float]]]) -> Table:
    done = min(len(each) for each in steps.values())
    edge = min(done, max(5, done // 10))
    table = Table(
        f"quantised-rl-{model_name}{'-cpu' if device == 'cpu' else ''}",
        f"GRPO for {done} steps with {weights / 1e6:,.1f} M weights: the policy that draws tokens is quantised",
        ["policy", "importance weights", "reward, first → last", "mismatch, nats per token", "weights above the cap"],
    )
    for name, each in steps.items():
        corrects = not name.endswith("-")
        table.rows.append(
            [
                name.removesuffix("-"),
                "yes" if corrects else "no",
                f"{_mean(each[:edge], 'reward'):.3f} → {_mean(each[done - edge : done], 'reward'):.3f}",
                f"{_mean(each[:done], 'mismatch_kl'):.2e}",
                f"{100 * _mean(each[:done], 'truncated'):.2f}%" if corrects else "",
            ]
        )
    spread = [stdev(step["reward"] for step in each[done - edge : done]) if edge > 1 else 0.0 for each in steps.values()]
    seconds = {kind: _mean([step for each in steps.values() for step in each], f"{kind}_seconds") for kind in ("publish", "draw", "train")}
    table.notes.append(
        f"Rewards are means of the first and the last {edge} steps; the standard deviation of one step is {mean(spread):.3f}. All runs "
        "have the same prompts and seeds. Scales stay from step to step where they can. "
        f"Device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}; a step took "
        + ", ".join(f"{value:.2f} s to {kind}" for kind, value in seconds.items())
        + "."
    )
    return table


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return mean(step[name] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the longest time, pre-training included; not with --folder")
    parser.add_argument("--folder", type=Path, default=None, help="where the pre-trained model and the runs that are done are kept")
    parser.add_argument("--pretraining", type=int, default=None, metavar="STEPS")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=None, help="recipes; with a minus, without importance weights")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the table to this file, and not into the documentation")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    table = measure(
        arguments.model,
        device=arguments.device,
        steps=arguments.steps,
        seconds=arguments.seconds,
        pretraining=arguments.pretraining,
        names=arguments.runs,
        folder=arguments.folder,
    )
    show(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(table), indent=1, ensure_ascii=False) + "\n")
    else:
        keep(table)


if __name__ == "__main__":
    main()
